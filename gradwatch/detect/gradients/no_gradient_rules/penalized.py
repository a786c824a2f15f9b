"""Find the tensors whose only gradient is that of a penalty on the squares of all weights.

Such a penalty, which the loop adds to its loss, gives each tensor a gradient that is the tensor itself times one
factor. So the ratio of the two norms is the same in each tensor that the rest of the loss does not reach, and at each
step. In other tensors it changes from step to step, as the batches do. One tensor alone shows as much if it has moved.
"""

# T = measured steps, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.history.store import History


def are_penalized(history: History, *, spread: float, moved: float) -> NDArray[np.bool_]:
    """Return which tensors have one ratio of gradient to weight, and share it with another tensor or move: shape (L,).

    Args:
        history: History of the run.
        spread: Relative difference up to which two ratios are the same.
        moved: Relative change of the norm of a tensor from which its constant ratio is enough.
    """
    norm_TL = history.param.window("weight.l2")
    is_measured_T = ~np.isnan(norm_TL).all(axis=1)
    norm_TL = norm_TL[is_measured_T]
    if len(norm_TL) < 2:
        return np.zeros(norm_TL.shape[1], np.bool_)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_TL = history.param.window("grad.l2")[is_measured_T] / norm_TL
        # nan, as of a tensor of zeros, equals nothing
        is_constant_L = np.logical_and.reduce(_are_equal(ratio_TL, ratio_TL[0], spread=spread))
        moves_L = ~np.logical_and.reduce(_are_equal(norm_TL, norm_TL[0], spread=moved))
    constant = np.flatnonzero(is_constant_L)
    for i in constant:
        alike = _are_equal(ratio_TL[0, constant], ratio_TL[0, i], spread=spread)
        is_constant_L[i] = moves_L[i] or np.count_nonzero(alike) > 1
    return np.asarray(is_constant_L)


def _are_equal(values: Floats, others: Floats, *, spread: float) -> NDArray[np.bool_]:
    """Return which values are the same, and above zero."""
    return np.asarray((np.abs(values - others) <= spread * others) & (others > 0))
