"""Decide whether a learning rate is still warming up to a useful value."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.history.store import History

WINDOW_STEPS = 32
"""Steps over which the slope of the learning rate is measured."""

MAX_SLOPE_FACTOR = 1.1
"""Slope of the second half of the window over the slope of the first half, above which the rate grows ever faster and
may soon be large. For a straight line both slopes are equal."""

USEFUL_FACTOR = 10
"""Update/weight ratio, in units of the negligible one, that a warm-up must reach."""


def is_warming_up(history: History, level: float, *, ratio: float, horizon: int) -> bool:
    """Return whether the rate is rising and will reach a useful update/weight ratio in time.

    Args:
        history: History of the run.
        level: Update/weight ratio at the newest measurement.
        ratio: Update/weight ratio up to which an update is negligible.
        horizon: Steps that a warm-up may still need.
    """
    rate_T = history.scalar("lr.0", WINDOW_STEPS)
    middle, last = len(rate_T) // 2, len(rate_T) - 1
    early, late = (rate_T[middle] - rate_T[0]) / middle, (rate_T[last] - rate_T[middle]) / (last - middle)
    if not late > 0 or late > MAX_SLOPE_FACTOR * early:
        return bool(late > 0)  # no rise, or one that speeds up
    steps_to_go = (USEFUL_FACTOR * ratio / level - 1) * rate_T[last] / late if level > 0 else np.inf
    steps_left = (history.info.total_steps or np.inf) - history.step  # an unknown length limits nothing
    return bool(steps_to_go <= min(horizon, steps_left))
