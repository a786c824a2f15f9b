"""Find parameters of a few numbers that updates throw about, and that have nearly all of the gradient.

The first update was many times as large as the parameter, so the parameter is of another unit than the rate is meant
for. A coefficient that finds its place takes smaller and smaller updates. One that updates of its own size throw about
never does, and takes the loss with it.
"""

# T = steps of a window, F = coefficients

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

MIN_FIRST_RATIO = 30.0
"""First update, in units of the parameter, at which the parameter is of another unit than the rate is meant for."""

MIN_SHARE = 0.9
"""Share of the total norm that is nearly all of it: the other gradients together make up 0.44."""

MEASUREMENTS = 5
"""Measured updates, the median of which counts."""


def find_unstable_coefficients(history: History, *, thrown: float) -> Iterator[Sign]:
    """Yield a sign for each parameter of a few numbers that updates throw about zero.

    Args:
        history: Of the run.
        thrown: Least update/weight ratio of the newest measurements.
    """
    coefficients_F = structure_of(history).coefficients_F
    if not len(coefficients_F) or not (history.param.newest("update.ratio")[coefficients_F] >= thrown).any():
        return
    ratio_TF, grad_TF = (history.param.window(name)[:, coefficients_F] for name in ("update.ratio", "grad.l2"))
    measured_T = ~np.isnan(ratio_TF).all(axis=1)
    first_F = first_steps(history, "update.ratio", 1)[0, coefficients_F]
    if np.count_nonzero(measured_T) < MEASUREMENTS:
        return
    share_TF = grad_TF / history.scalar("grad_norm.before_clip", len(grad_TF))[:, None]
    ratio_F, share_F = (median(values_TF[measured_T][-MEASUREMENTS:]) for values_TF in (ratio_TF, share_TF))
    for place in np.flatnonzero((first_F >= MIN_FIRST_RATIO) & (ratio_F >= thrown) & (share_F >= MIN_SHARE)):
        name = history.info.layers[coefficients_F[place]].name
        yield Sign(
            f"the first update of {name} was {first_F[place]:,.3g} times its size, the newest are "
            f"{ratio_F[place]:.2g} times its size, and it has nearly all of the gradient",
            (
                Quantity(key="update.ratio.first", label="first update.ratio", value=float(first_F[place])),
                Quantity(
                    key="update.ratio.newest_median",
                    label="median of the newest update.ratio",
                    value=float(ratio_F[place]),
                ),
                Quantity(
                    key="imbalance.share_of_norm",
                    label="its gradient / total norm",
                    value=float(share_F[place]),
                ),
            ),
            layer=name,
        )
