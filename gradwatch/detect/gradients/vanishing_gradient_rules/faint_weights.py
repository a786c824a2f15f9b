"""Find a model in which only the output bias learns, because all weights get almost no gradient.

If layers are too small, the signal vanishes on its way forward just as the gradient does on its way back. The gradients
of the weights are products of the two, and have no slope over depth. All of them lie far below the gradient of the
output bias.
"""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.vanishing_gradient_rules.stuck import MEDIAN_STEPS, is_stuck
from gradwatch.history.store import History
from gradwatch.records import Quantity

MIN_MATRICES = 3
"""Minimum number of weight matrices for a signal to vanish on its way."""


def find_faint_weights(history: History, *, decades: float, at_once: float) -> Sign | None:
    """Return a sign if the loss reaches the output bias and almost no weight.

    Args:
        history: History of the run.
        decades: Distance of the weights below the bias, in powers of ten, that counts if the loss is stuck.
        at_once: Distance that counts without waiting for the loss.
    """
    structure = structure_of(history)
    bias, indices_M = structure.chain.output_bias, structure.matrices.indices_M
    if bias is None or len(indices_M) < MIN_MATRICES:
        return None
    l2_TL = history.param.window("grad.l2", MEDIAN_STEPS)
    # cheap: the newest step alone, at the lower of both bounds
    if len(l2_TL) < MEDIAN_STEPS or not _is_faint(history, l2_TL[-1:], bias, min(decades, at_once)):
        return None
    if not _is_faint(history, l2_TL, bias, decades if is_stuck(history) else at_once):
        return None
    size_L = median(l2_TL)
    fall = float(np.log10(size_L[bias] / size_L[indices_M].max()))
    return Sign(
        f"the gradient of every weight is at least {format_fold(fall)} smaller than the gradient of the output's bias",
        (
            Quantity(
                key="output_bias.fall_decades",
                label="gradient of the output's bias / largest weight gradient",
                value=fall,
                unit="orders of magnitude",
            ),
            Quantity(key="grad.l2.output_bias", label="grad.l2 of the output's bias", value=float(size_L[bias])),
        ),
        layer=module_of(history, int(indices_M[0])),
    )


def _is_faint(history: History, l2_TL: Floats, bias: int, decades: float) -> bool:
    """Return whether at each step every weight gradient is at least `decades` below the output bias."""
    most_T = l2_TL[:, structure_of(history).matrices.indices_M].max(axis=1)
    return bool(((most_T > 0) & (most_T < 10**-decades * l2_TL[:, bias])).all())
