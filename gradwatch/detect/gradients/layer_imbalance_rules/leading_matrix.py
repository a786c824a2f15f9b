"""Find the weight matrix with gradient elements far larger than in every other matrix.

Biases, norms, scalars and embeddings are left out: their gradients differ in size by nature. The output layer of a
deeper network is left out too: if it leads, the other matrices are compared instead. The largest of them must stand out
from a group instead of being the upper end of a slope.

A lead that began with the fall of all others is for information: they pass on less, as behind attention that has become
one-hot or weights that are clipped, and the leader is no larger than it was.

Wrong for a head that is zero-initialized, or has a much larger loss weight, on purpose.
"""

# T = steps of a window, M = weight matrices and kernels

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.detect.gradients.layer_imbalance_rules.own_rate import has_lower_rate
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_leading_matrix(
    history: History,
    *,
    decades: float,
    steps: int,
    matrices: int,
    shallow_matrices: int,
    output_input_size: float,
    own_rate: float,
    first_decades: float,
) -> Sign | None:
    """Return a sign for the matrix with a gradient far above all others.

    Args:
        history: History of the run.
        decades: Minimum lead over the second largest matrix, in powers of ten.
        steps: Newest steps over which the smallest lead counts.
        matrices: Minimum number of weight matrices.
        shallow_matrices: Maximum number of weight matrices with which the output layer counts too.
        output_input_size: Size of the output layer's inputs below which it does not lead.
        own_rate: Rate of the layer's group, over the lowest rate of the others, that makes up for its gradient.
        first_decades: Lead at the first step, in powers of ten, above which the matrix led from the start.
    """
    newest_M = np.sort(matrix_rms(history, history.param.newest("grad.l2")))  # nan comes last
    if float(newest_M[-1]) < 10**decades * float(newest_M[-3:][0]):  # cheap: the leader is not far above the third
        return None
    # x == x is False for nan, which sorts last
    known_M = newest_M if newest_M[-1] == newest_M[-1] else newest_M[~np.isnan(newest_M)]
    if len(known_M) < matrices or not 0 < known_M[-2] <= known_M[-1] < np.inf:
        return None
    # the first or, if the output layer leads, the second matrix must lead
    if not (known_M[-2:] >= 10**decades * known_M[-3:-1]).any():
        return None
    l2_TL = history.param.window("grad.l2", steps)
    level_M = log10(matrix_rms(history, median(l2_TL)))
    if len(l2_TL) < steps or np.isnan(level_M).all():
        return None
    has_small_inputs = _has_small_inputs(history, l2_TL, output_input_size=output_input_size)
    may_output_lead = len(level_M) <= shallow_matrices and not has_small_inputs
    top, lead = _pick_leader(
        history, l2_TL, level_M, decades=decades, matrices=matrices, may_output_lead=may_output_lead
    )
    if not lead >= decades:
        return None
    tensor = int(structure_of(history).matrices.indices_M[top])
    layer = module_of(history, tensor)
    is_harmless = has_lower_rate(history, tensor, own_rate=own_rate) or _has_lead_by_fall(
        history, level_M, top, first_decades=first_decades
    )
    others = "layer" if level_M[top] == np.nanmax(level_M) else "layer before the output"
    return Sign(
        f"the gradient of {layer} is at least {format_factor(10**lead)} times the gradient of any other {others}",
        (
            Quantity(
                key="imbalance.lead_over_second_decades",
                label="gradient / second largest, at least",
                value=lead,
                unit="orders of magnitude",
            ),
            Quantity(
                key="imbalance.lead_over_median_decades",
                label="gradient / median layer",
                value=float(level_M[top] - median(level_M)),
                unit="orders of magnitude",
            ),
            Quantity(key="grad.element", label="gradient element", value=float(10 ** level_M[top])),
        ),
        layer=layer,
        severity=Severity.INFO if is_harmless else None,
    )


def _has_lead_by_fall(history: History, level_M: Floats, top: int, *, first_decades: float) -> bool:
    """Return whether the matrix did not lead at first, and the fall of the others made most of its lead."""
    first_M = log10(matrix_rms(history, first_measured(history, "grad.l2")))
    lead, first_lead = (float(log_M[top] - np.fmax.reduce(np.delete(log_M, top))) for log_M in (level_M, first_M))
    growth = float(level_M[top] - first_M[top])
    return first_lead <= first_decades and growth < (lead - first_lead) / 2  # False for nan: no gradient at first


def _pick_leader(
    history: History, l2_TL: Floats, level_M: Floats, *, decades: float, matrices: int, may_output_lead: bool
) -> tuple[int, float]:
    """Return the matrix with the largest gradient and its smallest lead over the second largest, in decades."""
    log_TM = log10(matrix_rms(history, l2_TL))
    top, lead = _lead(log_TM, level_M)
    if top < len(level_M) - 1:
        return top, lead
    if lead >= decades and may_output_lead:
        return top, lead
    rest_M = np.sort(level_M[:-1][~np.isnan(level_M[:-1])])
    # the lead must exceed the spread of the rest, which a slope over depth does not do
    if len(rest_M) < matrices or rest_M[-1] - rest_M[-2] < rest_M[-2] - rest_M[0]:
        return top, 0.0
    return _lead(log_TM[:, :-1], level_M[:-1])


def _lead(log_TM: Floats, level_M: Floats) -> tuple[int, float]:
    """Return the matrix with the highest level and its smallest lead over the largest other matrix."""
    top = int(np.nanargmax(level_M))
    rest_T = np.fmax.reduce(np.delete(log_TM, top, axis=1), axis=1)
    return top, float(np.fmin.reduce(log_TM[:, top] - rest_T))


def _has_small_inputs(history: History, l2_TL: Floats, *, output_input_size: float) -> bool:
    """Return whether the gradient of the output layer's weight is far below the gradient of its bias: small inputs."""
    structure = structure_of(history)
    if structure.chain.output_bias is None:
        return False
    pair = [int(structure.matrices.indices_M[-1]), structure.chain.output_bias]
    weight, bias = median(l2_TL[:, pair]) / structure.rms_scale_L[pair]
    return bool(weight < output_input_size * bias)
