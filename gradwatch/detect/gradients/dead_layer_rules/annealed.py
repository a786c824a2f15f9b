"""Recognize a layer whose part of the loss was annealed to zero: its gradient shrank step by step, and then ended.

The weight of an auxiliary loss does so by its schedule. Units that die take their elements of the gradient with them,
and a saturated unit takes its gradient through many powers of ten before it rounds to zero.
"""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import History

LAST, EARLIER = slice(-4, None), slice(-24, -16)
"""Steps with a gradient that are compared: the last ones, and some before them."""


def is_annealed(history: History, group: list[int], *, ratio: float, decades: float) -> bool:
    """Return whether the gradient of some tensors shrank evenly until it ended, with no more zeros in it than before.

    Args:
        history: History of the run.
        group: Indices of the tensors, which have no gradient now.
        ratio: Maximum ratio of the last gradients to the earlier ones.
        decades: Powers of ten between them that show that the gradient rounds to zero.
    """
    l2_TL = history.param.window("grad.l2")[:, group]
    live_T = np.flatnonzero((l2_TL > 0).all(axis=1))
    if len(live_T) < -EARLIER.start:
        return False
    zeros_TL = history.param.window("grad.zero_frac")[:, group]
    size_T = np.sqrt((l2_TL[live_T].astype(np.float64) ** 2).sum(axis=1))
    zeros_T: Floats = zeros_TL[live_T].max(axis=1)
    left = float(median(size_T[LAST]) / median(size_T[EARLIER]))
    return 10**-decades <= left <= ratio and float(median(zeros_T[LAST])) <= float(zeros_T[EARLIER].max())
