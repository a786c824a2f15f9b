"""What a schedule has done to the learning rate."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats

SPAN = 64
"""Steps within which a jump of the rate answers for what follows it."""

JUMP = 3.0
"""Rise over the largest rate before that is a jump: milestones fall, warm-ups rise in small steps."""


def last_jump(rate_T: Floats, factor: float = JUMP) -> int | None:
    """Return the row at which a rate last rose so many times above all rows before it, or None where it never did.

    Args:
        rate_T: Learning rates of successive steps, of shape (T,). A rate that starts at zero does not jump.
        factor: Rise that counts.
    """
    before_T = np.maximum.accumulate(rate_T)[:-1]
    jumps = np.flatnonzero((rate_T[1:] >= factor * before_T) & (before_T > 0))
    return int(jumps[-1]) + 1 if len(jumps) else None
