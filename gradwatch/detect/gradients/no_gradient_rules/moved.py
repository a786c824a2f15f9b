"""Tell which tensors move without a gradient: copies, averages, and weights that the loop updates by hand."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Recovery
from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.recovery import tensors_of
from gradwatch.history.store import History
from gradwatch.records import Finding


def are_copies(history: History) -> NDArray[np.bool_]:
    """Return which tensors outside the optimizer started as a copy of a trained tensor, or move anyway."""
    layers, l2_TL = history.info.layers, history.param.window("weight.l2")
    moved_L = np.fmax.reduce(l2_TL) > np.fmin.reduce(l2_TL)
    first_L = first_measured(history, "weight.l2")
    held = {(layer.shape, first) for layer, first in zip(layers, first_L, strict=True) if layer.group is not None}
    copied_L = np.array(
        [
            layer.group is None and (is_moved or (layer.shape, first) in held)
            for layer, first, is_moved in zip(layers, first_L, moved_L, strict=True)
        ],
        np.bool_,
    )
    is_matrix_L = np.array([len(layer.shape) >= 2 for layer in layers], np.bool_)
    return copied_L if (copied_L & is_matrix_L).any() else np.zeros_like(copied_L)  # zeros and ones equal each other


def are_moved_by_hand(history: History, *, least: int) -> NDArray[np.bool_]:
    """Return which tensors have no gradient at all, and yet another norm from measurement to measurement: shape (L,).

    An optimizer leaves a tensor alone whose gradient is None, weight decay included. A trust region or a natural
    gradient moves its weights in the loop, by a gradient that is stored nowhere.

    Args:
        history: History of the run.
        least: Minimum number of changes. With two measurements so far, one will do.
    """
    norm_TL = history.param.window("weight.l2")
    norm_TL = norm_TL[~np.isnan(norm_TL).all(axis=1)]
    if len(norm_TL) < 2:
        return np.zeros(len(history.info.layers), np.bool_)
    is_missing_L = np.isnan(history.param.window("grad.l2")).all(axis=0)
    moves_L = (np.abs(np.diff(norm_TL, axis=0)) > 0).sum(axis=0)
    return np.asarray(is_missing_L & (moves_L >= min(least, len(norm_TL) - 1)))


def find_moves_by_hand(history: History, finding: Finding, *, least: int) -> Recovery | None:
    """Return when the loop moved a tensor of a finding, once it moves all of them by hand.

    Args:
        history: History of the run.
        finding: Finding about missing gradients.
        least: As in `are_moved_by_hand`.
    """
    tensors = tensors_of(history, finding)
    if not are_moved_by_hand(history, least=least)[tensors].all():
        return None
    norm_TL = history.param.window("weight.l2")[:, tensors]
    is_measured_T = ~np.isnan(norm_TL).all(axis=1)
    moved_T = (np.abs(np.diff(norm_TL[is_measured_T], axis=0)) > 0).any(axis=1)
    first = int(np.argmax(moved_T)) + 1
    return Recovery(int(history.param.steps()[is_measured_T][first]), "the loop moved it by hand")
