"""Find the layer with inputs of another unit, so that its gradient dominates the others.

The gradient of a weight is the gradient of the outputs times the inputs. The gradient of the bias is the gradient of
the outputs alone. Their ratio is the usual size of the inputs. Other layers suffer if the layer makes up nearly all of
the total norm, or if another matrix gets almost no gradient.
"""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels, B = the ones with a bias

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.detect.gradients.layer_imbalance_rules.own_rate import has_lower_rate
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

DRAWN_TOO_LARGE = "poor-initialization"
"""Kind of finding for too large initial weights, which make the inputs of later layers too large."""

ROUNDING = 1e-6
"""Relative error of a float32 quotient, with room to spare."""


def find_unscaled_inputs(
    history: History, *, decades: float, steps: int, raw: float, starved: float, own_rate: float
) -> Sign | None:
    """Return a sign for the layer that dominates others because its inputs are of another unit.

    Args:
        history: History of the run.
        decades: Minimum size of the inputs, and distance of another matrix below the layer, in powers of ten.
        steps: Newest steps that must all show it.
        raw: Maximum norm of all other gradients over the layer's norm.
        starved: Maximum gradient of another matrix over the layer's, in units of 1 / input size.
        own_rate: Rate of the layer's group, over the lowest rate of the others, that makes up for its gradient.
    """
    l2_TL = history.param.window("grad.l2", steps)
    if len(l2_TL) < steps or not _may_be_large(history, l2_TL[-1], size=10**decades):
        return None
    matrices = structure_of(history).matrices
    least_B = _input_sizes(history, l2_TL).min(axis=0)
    rms_TM = matrix_rms(history, l2_TL.astype(np.float64))
    for b in np.flatnonzero((least_B >= 10**decades) & (rms_TM[:, matrices.biased_B] > 0).all(axis=0)).tolist():
        place, size = int(matrices.biased_B[b]), float(least_B[b])
        tensor, bias = int(matrices.indices_M[place]), int(matrices.bias_M[place])
        own_T = l2_TL[:, tensor].astype(np.float64)
        # float64, because squares of large norms overflow float32
        others_TL = np.delete(l2_TL.astype(np.float64), [tensor, bias], axis=1)
        rest = float((np.sqrt(np.nansum(others_TL**2, axis=1)) / own_T).max())
        weakest = float((np.fmin.reduce(rms_TM, axis=1) / rms_TM[:, place]).max())
        is_starving = 0 < weakest <= min(10**-decades, starved / size)
        if 0 < rest <= raw or is_starving:
            # too large weights in earlier layers also make large inputs: then they are the cause
            is_drawn = any(f.kind == DRAWN_TOO_LARGE and f.severity >= Severity.WARNING for f in history.findings)
            return _sign(
                module_of(history, tensor),
                size=size,
                rest=rest,
                weakest=weakest,
                is_swamped=rest <= raw,
                is_known=is_drawn or has_lower_rate(history, tensor, own_rate=own_rate),
            )
    return None


def _sign(layer: str, *, size: float, rest: float, weakest: float, is_swamped: bool, is_known: bool) -> Sign:
    effect = (
        f"all other gradients together have at most {100 * rest:.2g} % of its norm"
        if is_swamped
        else f"another layer gets at most {weakest:.1g} times its gradient"
    )
    return Sign(
        f"the inputs of {layer} have a size of about {format_factor(size)}: {effect}",
        (
            Quantity(key="input_scale.weight_by_bias", label="weight gradient / bias gradient", value=size),
            Quantity(key="imbalance.others_by_own", label="norm of all other gradients / norm of this one", value=rest),
            Quantity(
                key="input_scale.weakest_by_own",
                label="smallest gradient of another matrix / this gradient",
                value=weakest,
            ),
        ),
        layer=layer,
        severity=Severity.INFO if is_known else None,
    )


def _may_be_large(history: History, l2_L: Floats, *, size: float) -> bool:
    """Return whether inputs of a layer with a bias may reach `size` at the newest step, cheaply."""
    structure = structure_of(history)
    matrices = structure.matrices
    if not len(matrices.biased_B):
        return False
    weight, bias = matrices.indices_M[matrices.biased_B], matrices.bias_M[matrices.biased_B]
    scale_L = structure.rms_scale_L
    bias_B = (l2_L[bias] / scale_L[bias]).astype(np.float64)
    # a product instead of a quotient, so the rounding of the quotient needs a margin
    may_B = l2_L[weight] / scale_L[weight] >= size * (1 - ROUNDING) * bias_B
    return bool(may_B.any()) and bool((may_B & (bias_B > 0)).any() and np.isfinite(l2_L).any())


def _input_sizes(history: History, l2_TL: Floats) -> Floats:
    """Return the usual input size of each layer with a bias, of shape (T, B); 0 if the bias has no gradient."""
    structure = structure_of(history)
    matrices = structure.matrices
    bias = matrices.bias_M[matrices.biased_B]
    bias_TB = (l2_TL[:, bias] / structure.rms_scale_L[bias]).astype(np.float64)
    weight_TB = matrix_rms(history, l2_TL)[:, matrices.biased_B]
    sizes_TB: Floats = np.divide(weight_TB, bias_TB, out=np.zeros(bias_TB.shape), where=bias_TB > 0)
    return sizes_TB
