"""Find a backward pass that amplifies the gradient: the weights get far more than the loss sends in.

The gradient of the output layer's bias is the signal that the loss sends in, whatever its units. The gain is the
gradient norm of the median weight matrix over the norm of that bias.

Wrong if the bias is not part of the loss. A loss of derivatives with respect to the inputs (a physics-informed network)
does not depend on the bias. Nor does a loss that stays constant when all outputs shift by the same amount. So losses
that compare outputs with each other are left out. With several heads, each of which has a part of the loss, the signal
is that of all their biases.
"""

# T = steps of a window, L = parameter tensors, O = matrices that an optimizer holds

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.exploding_gradient_rules.climb import BLOCK_STEPS, NORM
from gradwatch.events import DERIVATIVE, HEADS, OUTPUT_PAIRS
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_backward_gain(history: History, *, kind: str, decades: float, cancelled: float) -> Sign | None:
    """Return a sign if the backward pass amplifies the gradient that the loss sends in.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding; an earlier finding of this kind suffices.
        decades: Minimum gain at each of the newest steps, in powers of ten.
        cancelled: Gradient of the output bias, over the gradient of its weight, below which it is rounding error.
    """
    optimized_O, biases = structure_of(history).matrices.optimized_O, _output_biases(history)
    if not biases or len(optimized_O) < 2:
        return None
    l2_L = history.param.newest("grad.l2")
    inflow = float(np.linalg.norm(l2_L[biases]))
    if (
        not inflow * 10**decades < np.fmax.reduce(l2_L[optimized_O])
        or len(history.run.steps(BLOCK_STEPS)) < BLOCK_STEPS
    ):
        return None
    is_bias_idle = any(events_of(history, DERIVATIVE)) or any(events_of(history, OUTPUT_PAIRS))
    if is_bias_idle or any(f.kind == kind for f in history.findings):
        return None
    # at the first step as well: later, collapsed outputs leave the weight with no more than rounding either
    starts = (l2_L, first_measured(history, "grad.l2"))
    if any(np.linalg.norm(l2[biases]) < cancelled * l2[optimized_O[-1]] for l2 in starts):
        return None
    l2_TL = history.param.window("grad.l2", BLOCK_STEPS)
    gain_T = log10(median(l2_TL[:, optimized_O].T)) - log10(np.linalg.norm(l2_TL[:, biases], axis=1))
    gain = float(gain_T.min())  # nan if a step has no gradient, which is not enough
    if not gain >= decades:
        return None
    # the matrix with the largest gradient is where the amplification ends up
    layer = module_of(history, int(optimized_O[np.nanargmax(median(l2_TL[:, optimized_O]))]))
    return Sign(
        f"backprop amplifies the gradient {format_fold(gain)}; the largest is at {layer}",
        (
            Quantity(key="backward.gain_decades", label="gain of backprop", value=gain, unit="orders of magnitude"),
            Quantity(key="grad.l2.output_bias", label="grad.l2 of the output's bias", value=inflow),
            Quantity(key=NORM, value=float(history.run.newest(NORM)[0])),
        ),
        layer=layer,
        severity=Severity.WARNING,
    )


def _output_biases(history: History) -> list[int]:
    """Return the biases of the output layer or of all heads; none if one of them has no bias."""
    heads = next(events_of(history, HEADS), None)
    if heads is None:
        output_bias = structure_of(history).chain.output_bias
        return [] if output_bias is None else [output_bias]
    layers = history.info.layers
    modules = {layer.module for layer in layers if layer.name in heads.values}
    biases = {layer.module: i for i, layer in enumerate(layers) if len(layer.shape) == 1 and layer.module in modules}
    return list(biases.values()) if len(biases) == len(modules) else []
