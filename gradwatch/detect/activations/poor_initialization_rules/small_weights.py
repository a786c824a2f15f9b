"""Find hidden layers that were initialized so small that neither the signal nor the gradient passes."""

# L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.activations.poor_initialization_rules.gains import RECURRENT_PREFIXES, weight_gains
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, Quantity


def find_small_weights(
    detector: HasCode, history: History, *, faint: float, lost: float, layers: int
) -> Iterator[Finding]:
    """Yield the hidden layers with a small gain if the gradient of the median weight is lost too.

    Args:
        detector: Detector of the findings.
        history: History at step 0 or shortly after, of a model without normalization.
        faint: Gain below which a hidden layer counts as too small.
        lost: Powers of ten by which the median weight's gradient is below the gradient of the output bias.
        layers: Minimum number of such layers.
    """
    infos, structure = history.info.layers, structure_of(history)
    hidden_M = structure.matrices.indices_M[:-1]
    # the output bias shows the gradient before any weight shrinks it; a normalization restores the signal
    if structure.chain.output_bias is None or any("Norm" in info.module_type for info in infos):
        return
    gain_L = weight_gains(history)
    # zero weights are the case of `find_zero_weights`
    small = [
        int(i) for i in hidden_M if 0 < gain_L[i] < faint and not _is_scaled_by_state(infos, int(i), gain_L, faint)
    ]
    if len(small) < layers:
        return
    l2_L = history.param.newest("grad.l2")
    share = float(median(l2_L[hidden_M]) / l2_L[structure.chain.output_bias])
    if not share <= 10**-lost:  # nan: no gradient
        return
    affected_L = np.isin([info.module for info in infos], [infos[i].module for i in small])
    for layer, group in affected_modules(history, affected_L, kind=detector.kind):
        smallest = float(np.nanmin(gain_L[group]))
        yield finding_of(
            detector,
            history,
            f"{layer or 'the whole model'} was initialized with a gain of {smallest:.1g} "
            "(1 to 1.4 preserves the signal)",
            Quantity(key="gain", value=smallest),
            Quantity(key="init.small_layers", label="layers initialized too small", value=float(len(small))),
            Quantity(
                key="init.median_by_output_bias",
                label="median weight gradient / gradient of the output's bias",
                value=share,
            ),
            layer=layer,
        )


def _is_scaled_by_state(infos: tuple[LayerInfo, ...], i: int, gain_L: NDArray[np.float64], faint: float) -> bool:
    """Return whether a weight of the inputs of a recurrent layer is as small as torch makes it.

    Torch draws all weights of the layer by the size of its state. So a layer with few inputs and a large state has
    a small gain.
    """
    if not infos[i].module_type.startswith(RECURRENT_PREFIXES) or "weight_ih" not in infos[i].name:
        return False
    of_state = infos[i].name.replace("weight_ih", "weight_hh")
    return any(info.name == of_state and gain_L[j] >= faint for j, info in enumerate(infos))
