"""Find a part of the model whose gradient outgrows the rest: one term of its loss gets heavier without bound.

A weight that a schedule raises, such as that of a reversed gradient, a penalty or a bound on information, lifts the
gradients of all layers that its term reaches. They leave the level of the others together, so none leads the next. In
the end the term decides alone what these layers learn, whatever the optimizer makes of the size.

It is recognized by its growth: the parts were within a factor of ten at the start, and the rest still gets gradients.
"""

# T = steps of a window, M = weight matrices and kernels, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_growing_group(
    history: History,
    *,
    kind: str,
    decades: float,
    steps: int,
    size: int,
    first_decades: float,
    rest_fall_decades: float,
) -> Iterator[Sign]:
    """Yield a sign for each module whose matrices have all outgrown the other matrices.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding.
        decades: Minimum distance of the smallest matrix of the part from the largest of the rest, in powers of ten.
        steps: Newest steps over which the smallest distance counts.
        size: Minimum number of matrices in the part, and in the rest.
        first_decades: Maximum distance of the part from the rest at the start, in powers of ten.
        rest_fall_decades: Maximum fall of the rest since the start, in powers of ten.
    """
    newest_M = matrix_rms(history, history.param.newest("grad.l2"))
    # cheap, and False for nan: the whole spread is less than the distance
    if len(newest_M) < 2 * size or not newest_M.max() > 10**decades * newest_M.min() > 0:
        return
    l2_TL = history.param.window("grad.l2", steps)
    log_TM = log10(matrix_rms(history, l2_TL))
    if len(l2_TL) < steps or not np.isfinite(log_TM).all():
        return
    level_M = median(log_TM)
    order_M = np.argsort(level_M)
    gaps = np.diff(level_M[order_M])[size - 1 : len(order_M) - size]
    border = size + int(np.argmax(gaps))
    rest, part = order_M[:border], order_M[border:]
    distance = float((log_TM[:, part].min(axis=1) - log_TM[:, rest].max(axis=1)).min())
    if distance < decades:
        return
    first_M = log10(matrix_rms(history, first_measured(history, "grad.l2")))  # before the first update
    apart = float(median(first_M[part]) - median(first_M[rest]))
    has_grown = float((level_M[part] - first_M[part]).min()) >= decades - first_decades
    is_rest_alive = float(median(level_M[rest] - first_M[rest])) >= -rest_fall_decades
    if not (apart <= first_decades and has_grown and is_rest_alive):  # False for nan: no gradient at the start
        return
    modules = {history.info.layers[i].module for i in structure_of(history).matrices.indices_M[part]}
    affected_L = np.array([layer.trainable and layer.module in modules for layer in history.info.layers])
    for layer, _ in affected_modules(history, affected_L, kind=kind):
        yield Sign(
            f"the gradient of {layer} has outgrown all others: it is at least {format_factor(10**distance)} times as "
            f"large, and was {format_factor(10**apart)} times as large at the start",
            (
                Quantity(
                    key="imbalance.group_lead_decades",
                    label="smallest gradient of the part / largest of the rest, at least",
                    value=distance,
                    unit="orders of magnitude",
                ),
                Quantity(
                    key="imbalance.group_lead_first_decades",
                    label="gradient of the part / the rest, first step",
                    value=apart,
                    unit="orders of magnitude",
                ),
            ),
            layer=layer,
        )
