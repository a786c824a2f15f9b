"""Decide whether a learning rate is still warming up to a useful value."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.history.store import History

WINDOW_STEPS = 32
"""Steps over which the slope of the learning rate is measured."""


def is_warming_up(history: History, level: float, *, useful: float, horizon: int, speed_up: float) -> bool:
    """Return whether the rate is rising and will reach a useful update/weight ratio in time.

    Args:
        history: History of the run.
        level: Update/weight ratio at the newest measurement.
        useful: Update/weight ratio that it must reach.
        horizon: Steps that a warm-up may still need.
        speed_up: Slope of the rate in the second half of the window, over its slope in the first half, above which the
            rate grows ever faster and may soon be large.
    """
    rate_T = history.scalar("lr.0", WINDOW_STEPS)
    middle, last = len(rate_T) // 2, len(rate_T) - 1
    early, late = (rate_T[middle] - rate_T[0]) / middle, (rate_T[last] - rate_T[middle]) / (last - middle)
    if not late > 0 or late > speed_up * early:
        return bool(late > 0)  # no rise, or one that speeds up
    steps_to_go = (useful / level - 1) * rate_T[last] / late if level > 0 else np.inf
    steps_left = (history.info.total_steps or np.inf) - history.step  # an unknown length limits nothing
    return bool(steps_to_go <= min(horizon, steps_left))
