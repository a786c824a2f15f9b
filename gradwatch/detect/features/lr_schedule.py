"""Find jumps in a learning-rate schedule."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats

JUMP_WINDOW_STEPS = 64
"""Steps after a jump of the learning rate in which the jump explains what happens."""

MIN_JUMP_FACTOR = 3.0
"""Rise over the largest rate before that counts as a jump: milestones fall, warm-ups rise in small steps."""


def last_jump(rate_T: Floats, factor: float = MIN_JUMP_FACTOR) -> int | None:
    """Return the row at which a rate last rose by a factor over all rows before it, or None where it never did.

    Args:
        rate_T: Learning rates of successive steps, of shape (T,). A rate that starts at zero does not jump.
        factor: Rise that counts.
    """
    before_T = np.maximum.accumulate(rate_T)[:-1]
    jumps = np.flatnonzero((rate_T[1:] >= factor * before_T) & (before_T > 0))
    return int(jumps[-1]) + 1 if len(jumps) else None
