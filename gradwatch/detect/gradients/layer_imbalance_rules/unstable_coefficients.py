"""Find parameters of a few numbers with nearly all of the gradient, which updates throw around.

The first update was many times as large as the parameter, so the rate is meant for parameters of another unit. A
coefficient that converges takes smaller and smaller updates. A coefficient with updates of its own size never
converges, and the loss follows it.
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
"""First update, over the size of the parameter, at which the rate is meant for parameters of another unit."""

MIN_SHARE = 0.9
"""Share of the total norm that counts as nearly all of it: the other gradients together make up 0.44."""

MEASUREMENTS = 5
"""Measured updates in the median."""


def find_unstable_coefficients(history: History, *, thrown: float) -> Iterator[Sign]:
    """Yield a sign for each parameter of a few numbers that updates throw around zero.

    Args:
        history: History of the run.
        thrown: Minimum update/weight ratio of the newest measurements.
    """
    coefficients_F = structure_of(history).coefficients_F
    if not len(coefficients_F) or not (history.param.newest("update.ratio")[coefficients_F] >= thrown).any():
        return
    ratio_TF, grad_TF = (history.param.window(name)[:, coefficients_F] for name in ("update.ratio", "grad.l2"))
    # updates are measured at some steps only
    measured_T = ~np.isnan(ratio_TF).all(axis=1)
    first_F = first_steps(history, "update.ratio", 1)[0, coefficients_F]
    if np.count_nonzero(measured_T) < MEASUREMENTS:
        return
    # before clipping, like the gradients themselves
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
