"""Find layers whose input has become zero, so that nothing before them learns: a dropout rate of 1, a closed gate.

The gradient of a weight is the product of its input and the gradient of its output, which is the gradient of the bias.
So if the bias has a gradient and the weight has none, the input is zero. If all gradients are zero, the loss is: a
satisfied hinge, or a fit without noise.
"""

# T = kept steps, B = weight matrices with a bias

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.history.table import Floats
from gradwatch.records import Quantity


def find_zero_inputs(history: History, *, kind: str, steps: int) -> Iterator[Sign]:
    """Yield a sign for each layer that had an input, and had none in the newest steps, if most tensors lost theirs.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding.
        steps: Minimum number of steps in a row without an input.
    """
    structure = structure_of(history)
    newest_L = history.param.newest("grad.l2")
    # fewer tensors at zero are the case of `find_frozen`
    if 2 * np.count_nonzero((newest_L == 0) & structure.is_trainable_L) <= structure.num_trainable:
        return
    named = {name for finding in history.findings if finding.kind == kind for name in finding.names}
    matrices = structure.matrices
    weights_B, biases_B = matrices.indices_M[matrices.biased_B], matrices.bias_M[matrices.biased_B]
    recent_TL = history.param.window("grad.l2", steps)
    if len(recent_TL) < steps:
        return
    is_cut_B = _is_cut(recent_TL, weights_B, biases_B).all(axis=0)
    new = [place for place in np.flatnonzero(is_cut_B) if history.info.layers[weights_B[place]].name not in named]
    if not new:  # a whole series is copied, and most tensors of a fit without noise stay at zero
        return
    steps_T, l2_TL = history.param.series("grad.l2")
    for place in new:
        weight = history.info.layers[weights_B[place]]
        if (l2_TL[:, weights_B[place]] > 0).any():
            since = start_of_state(_is_cut(l2_TL, weights_B[place], biases_B[place]), steps_T)
            what = f"the input of {weight.module} is zero"
            text = f"{what}: its bias has a gradient, its weight and most of the model have none"
            yield Sign(text, (Quantity(key="grad.l2.largest", value=0.0),), since=since, layer=weight.name)


def _is_cut(l2_TL: Floats, weights: Any, biases: Any) -> NDArray[np.bool_]:
    """Return whether biases had a gradient and the weights next to them had none, by step."""
    is_cut: NDArray[np.bool_] = (l2_TL[:, weights] == 0) & (l2_TL[:, biases] > 0)
    return is_cut
