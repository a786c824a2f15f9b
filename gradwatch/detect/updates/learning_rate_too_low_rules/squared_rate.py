"""Find a schedule that returns a learning rate instead of a factor, so that the optimizer uses the rate's square."""

# T = steps of the run

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left
from gradwatch.history.store import WINDOW, History
from gradwatch.records import Quantity


def find_squared_rate(
    history: History,
    *,
    left: float,
    given: float,
    peak: tuple[float, float],
    falling_steps: int,
    level_steps: int,
) -> Sign | None:
    """Return the sign of a rate that peaked at the square of the optimizer's own.

    None if the run is longer than the window, which then lacks its first steps.

    Args:
        history: History of the run.
        left: Part of the first loss that must remain.
        given: Learning rate given to the optimizer up to which its square is not an accident.
        peak: Lowest and highest ratio of the largest rate to the square.
        falling_steps: Steps since the largest rate after which a warm-up is over.
        level_steps: Steps at the largest rate after which it is not a stage of a warm-up.
    """
    if history.step >= WINDOW:
        return None
    for group, initial in enumerate(history.info.initial_rates):
        if initial is None or not 0 < initial <= given:
            continue
        rate_T = history.scalar(f"lr.{group}")
        largest = float(np.fmax.reduce(rate_T))
        is_largest_T = rate_T == largest
        has_peaked = not is_largest_T[-falling_steps:].any() or is_largest_T[-level_steps:].sum() == level_steps
        is_square = peak[0] <= largest / initial**2 <= peak[1]
        if has_peaked and is_square and is_loss_left(history, left=left):
            return Sign(
                f"the schedule returns a learning rate instead of a factor: its largest rate, {largest:.3g}, is about "
                f"the square of the optimizer's {initial:.3g}",
                (
                    Quantity(key="lr.largest", label="largest learning rate", value=largest),
                    Quantity(key="lr.initial", label="learning rate given to the optimizer", value=initial),
                    Quantity(key="loss", value=float(history.run.newest("loss")[0])),
                ),
                since=0,
            )
    return None


def corrected_step(history: History, initial: float, *, correction: float) -> int | None:
    """Return the first step at which a rate was `correction` times the square of `initial`, or None if none was."""
    above_T = np.zeros(0, np.bool_)
    for group in range(history.groups):
        now_T = history.scalar(f"lr.{group}") >= correction * initial**2
        above_T = now_T if group == 0 else above_T | now_T
    return int(history.steps("lr.0")[-len(above_T) :][above_T.argmax()]) if above_T.any() else None
