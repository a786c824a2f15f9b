"""Find jumps in a learning-rate schedule."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats

JUMP_WINDOW_STEPS = 64
"""Steps after a jump of the learning rate for which the jump explains a symptom."""


def last_jump(rate_T: Floats, factor: float) -> int | None:
    """Return the last row at which a rate rose by a factor above all earlier rows, or None if it never did.

    Args:
        rate_T: Learning rates of successive steps, of shape (T,). A rate that starts at zero does not jump.
        factor: Factor that counts as a jump.
    """
    # above the maximum, not the previous rate: a warm restart returns to a rate the run has had
    before_T = np.maximum.accumulate(rate_T)[:-1]
    jumps = np.flatnonzero((rate_T[1:] >= factor * before_T) & (before_T > 0))
    # `jumps` indexes `rate_T[1:]`
    return int(jumps[-1]) + 1 if len(jumps) else None
