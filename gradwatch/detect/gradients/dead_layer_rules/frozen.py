"""Find tensors that had a gradient which is exactly zero now, while most other tensors have one.

If all gradients go to zero together, the loss is zero: a satisfied hinge, or a fit without noise.
"""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.dead_layer_rules.experts import is_side_by_side
from gradwatch.history.store import History


def find_frozen(history: History, newest_L: Floats, *, steps: int) -> NDArray[np.bool_]:
    """Return which tensors are exactly zero at each of the newest steps but were not always, of shape (L,)."""
    is_trainable_L = structure_of(history).is_trainable_L
    zero_L: NDArray[np.bool_] = (newest_L == 0) & is_trainable_L
    if not zero_L.any():
        return zero_L
    counts_L = ~is_side_by_side(history)  # a router may leave most of its experts alone
    # most tensors at zero: the loss is zero, and no layer is at fault
    if 2 * (zero_L & counts_L).sum() > (is_trainable_L & counts_L).sum():
        return np.zeros(len(newest_L), np.bool_)
    l2_TL = history.param.window("grad.l2")
    zero_L &= (l2_TL[-steps:] == 0).all(axis=0)
    # a tensor that never had a gradient is the case of `no-gradient`
    return np.asarray(zero_L & (l2_TL > 0).any(axis=0), np.bool_)
