"""Layers whose inputs are of another unit than the rest of the model, as their gradients tell."""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.structure import depth, matrix_sizes
from gradwatch.detect.features.words import factor
from gradwatch.history.store import History
from gradwatch.records import Quantity

ROOM = 10.0
"""Gradient of another matrix in units of 1 / size, which is left for it behind a normalisation that inputs swamp."""


def sizes_of_inputs(history: History, l2_TL: Floats) -> Floats:
    """Return the usual size of what is fed to each layer, of shape (T, M); zero where it has no bias, or that nothing.

    The gradient of a weight is that of the outputs times the inputs, and that of the bias is that of the outputs.
    """
    shape = depth(history)
    bias_TM = (l2_TL[:, shape.bias_M] / shape.root_numel_L[shape.bias_M]).astype(np.float64)
    bias_TM = np.where(shape.bias_M >= 0, bias_TM, 0.0)
    sizes_TM = matrix_sizes(history, l2_TL)
    sizes: Floats = np.divide(sizes_TM, bias_TM, out=np.zeros(bias_TM.shape), where=bias_TM > 0)
    return sizes


def raw_inputs(history: History, l2_TL: Floats, *, decades: float, left: float) -> tuple[int, Sign] | None:
    """Return the layer that inputs of another unit make swamp the others, and what tells so.

    Args:
        history: Of the run.
        l2_TL: L2 norms of the gradients at the newest steps, at each of which it must hold.
        decades: Size of the inputs, in powers of ten, and how far below the layer another matrix may lie.
        left: Norm of all other gradients, in units of the layer's own, that tells it as well.
    """
    shape = depth(history)
    least_M = sizes_of_inputs(history, l2_TL).min(axis=0)
    sizes_TM = matrix_sizes(history, l2_TL.astype(np.float64))
    for place in np.flatnonzero((least_M >= 10**decades) & (sizes_TM > 0).all(axis=0)).tolist():
        tensor = int(shape.matrices_M[place])
        own_T = l2_TL[:, tensor].astype(np.float64)
        others_TL = np.delete(l2_TL.astype(np.float64), [tensor, int(shape.bias_M[place])], axis=1)
        rest = float((np.sqrt(np.nansum(others_TL**2, axis=1)) / own_T).max())
        weakest = float((np.fmin.reduce(sizes_TM, axis=1) / sizes_TM[:, place]).max())
        is_starving = 0 < weakest <= min(10**-decades, ROOM / float(least_M[place]))
        if not (0 < rest <= left or is_starving):
            continue
        text = f"are about {factor(float(least_M[place]))} in size: "
        text += (
            f"all other gradients together have {100 * rest:.2g} % of the norm of its own at most"
            if rest <= left
            else f"another layer gets {weakest:.1g} of its gradient at most"
        )
        return tensor, Sign(
            text,
            (
                Quantity(
                    key="input_scale.weight_by_bias",
                    label="gradient of the weight, by that of the bias",
                    value=float(least_M[place]),
                ),
                Quantity(key="imbalance.others_by_own", label="norm of all other gradients, by its own", value=rest),
                Quantity(
                    key="input_scale.weakest_by_own",
                    label="smallest gradient of another matrix, by its own",
                    value=weakest,
                ),
            ),
        )
    return None
