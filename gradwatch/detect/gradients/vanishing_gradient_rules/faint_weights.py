"""Find a model in which only the output's bias learns, because all weights get next to no gradient.

If layers are too small, the signal vanishes on its way forward as the gradient does on its way back. The gradients of
the weights are products of the two, and have no slope over depth. All lie far below the gradient of the output's bias.
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
"""Weight matrices without which a signal does not vanish on its way."""


def find_faint_weights(history: History, *, decades: float, at_once: float) -> Sign | None:
    """Return a sign if the loss reaches the output's bias and next to no weight.

    Args:
        history: Of the run.
        decades: How far below the bias the weights must lie, in powers of ten, if the loss is stuck.
        at_once: The same without waiting for the loss.
    """
    structure = structure_of(history)
    bias, indices_M = structure.chain.output_bias, structure.matrices.indices_M
    if bias is None or len(indices_M) < MIN_MATRICES:
        return None
    l2_TL = history.param.window("grad.l2", MEDIAN_STEPS)
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
    """Return whether at each step the gradient of every weight matrix is so far below the output bias's."""
    most_T = l2_TL[:, structure_of(history).matrices.indices_M].max(axis=1)
    return bool(((most_T > 0) & (most_T < 10**-decades * l2_TL[:, bias])).all())
