"""Find updates that are negligible, and not only at the end of a schedule."""

# T = steps that measured the updates

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left
from gradwatch.history.store import WINDOW, History
from gradwatch.history.table import Steps
from gradwatch.records import Quantity


def find_negligible_updates(
    history: History,
    measured: tuple[Steps, Floats],
    *,
    ratio: float,
    samples: int,
    left: float,
    schedule_end: float,
) -> Sign | None:
    """Return the sign of updates that are negligible while much of the loss remains.

    Args:
        history: History of the run.
        measured: Steps that measured the updates, and the update/weight ratios at these steps, of shape (T,) each.
        ratio: Update/weight ratio below which an update is negligible.
        samples: Negligible updates in a row that count.
        left: Part of the first loss that must remain.
        schedule_end: Steps of the run, per step with negligible updates, above which these may end a schedule.
    """
    steps_T, level_T = measured
    moved = np.flatnonzero(level_T >= ratio)
    first = int(moved[-1]) + 1 if len(moved) else 0
    if len(level_T) - first < samples:
        return None
    still_steps = int(history.step - steps_T[first])
    is_end_of_schedule = len(moved) > 0 and schedule_end * still_steps < history.step
    # skipped updates are a matter of the loss scale, not of the rate
    is_skipping = (history.scalar("skipped", min(still_steps + 1, WINDOW)) == 1).any()
    if is_end_of_schedule or not is_loss_left(history, left=left) or is_skipping:
        return None
    largest = float(level_T[first:].max())
    rate = float(history.run.newest("lr.0")[0])
    how_much = f"by at most {100 * largest:.1g} %" if largest else f"by nothing, at a learning rate of {rate:.3g}"
    return Sign(
        f"for {still_steps} steps each measured update has changed the weights {how_much}",
        small_update_evidence(history, largest),
        since=int(steps_T[first]),
    )


def small_update_evidence(history: History, level: float) -> tuple[Quantity, ...]:
    """Return the evidence that goes with an update/weight ratio."""
    return (
        Quantity(key="update.ratio.median", label="median update.ratio", value=level),
        Quantity(key="lr.0", value=float(history.run.newest("lr.0")[0])),
        Quantity(key="loss", value=float(history.run.newest("loss")[0])),
    )
