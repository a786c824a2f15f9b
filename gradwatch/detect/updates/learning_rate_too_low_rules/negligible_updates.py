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

MIN_STILL_FRAC = 1 / 3
"""Part of the run for which updates must be negligible if they were larger before. The end of a schedule takes 1/50 of
a run (cosine) to 1/4 (milestones)."""


def find_negligible_updates(
    history: History, steps_T: Steps, level_T: Floats, *, ratio: float, samples: int, left: float
) -> Sign | None:
    """Return the sign of `samples` updates below `ratio`, if more than `left` of the loss remains."""
    moved = np.flatnonzero(level_T >= ratio)
    first = int(moved[-1]) + 1 if len(moved) else 0
    if len(level_T) - first < samples:
        return None
    still_steps = int(history.step - steps_T[first])
    is_end_of_schedule = len(moved) > 0 and still_steps < MIN_STILL_FRAC * history.step
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
