"""Find updates that do little but shrink the weights: a decay outweighs the gradient.

The update of a decay points at the origin, so the norm of a weight falls by the whole length of the update. The update
of a gradient is nearly orthogonal to the weight, and exactly so before a normalization (van Laarhoven 2017,
https://arxiv.org/abs/1706.05350, sec. 2). So the fall of the norm over the length of the path is the share of the decay
in the updates. It does not depend on the rate. A gradient that is far too small for an ordinary decay, as of a loss
that is divided by its number of samples twice, looks the same.

Wrong if other code makes the weights smaller between the updates: then the norm falls by more than the path.
"""

# T = measured steps of a window, W = weight matrices and kernels

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import loss_evidence
from gradwatch.detect.features.baseline import first_loss, newest_loss
from gradwatch.detect.features.events import measures_success
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.history.table import Steps
from gradwatch.records import Quantity, Severity

INWARD = "update.inward"

ROUNDING = 1e-5
"""Length of a path over its weight below which the fall of a norm is lost in float32: 100 times its precision."""


def find_inward_updates(history: History, *, share: tuple[float, float], intervals: int, left: float) -> Sign | None:
    """Return a sign if the updates of most weights point at the origin while much of the loss is left.

    Most are half of the matrices, and half of their numbers: the small vectors of many attention heads may decay while
    a few large layers learn.

    Args:
        history: History of the run.
        share: Fall of the norm of a matrix over the length of its path from which it is mostly decay, and above which
            other code makes the weights smaller.
        intervals: Newest intervals between two measurements that make the path.
        left: Part of the first loss that must be left.
    """
    indices_W = structure_of(history).matrices.indices_M
    # a linear model that begins too large shrinks to its solution; the rest is cheap, and False at most steps, for nan
    if len(indices_W) < 2 or not (history.param.newest("update.ratio")[indices_W] > 0).any():
        return None
    first, newest = first_loss(history), newest_loss(history)
    if not newest > left * first > 0:
        return None
    ratio_TW = history.param.window("update.ratio")[:, indices_W]
    is_known_T = ~np.isnan(ratio_TW).all(axis=1)
    steps_T = history.param.steps()[is_known_T][-intervals - 1 :]
    if len(steps_T) <= intervals:
        return None
    ratio_TW = ratio_TW[is_known_T][-intervals - 1 :]
    norm_TW = history.param.window("weight.l2")[is_known_T][-intervals - 1 :, indices_W]
    share_W = _inward_shares(steps_T, ratio_TW, norm_TW)
    found = float(median(share_W))
    # `<=` is False for nan
    if not share[0] <= found <= share[1] or 2 * np.count_nonzero(~np.isnan(share_W)) < len(share_W):
        return None
    numbers_W = np.array([math.prod(history.info.layers[w].shape) for w in indices_W])
    if 2 * numbers_W[share_W >= share[0]].sum() < numbers_W[~np.isnan(share_W)].sum():
        return None
    shrunk = 1 - float(median(norm_TW[-1] / norm_TW[0]))
    return Sign(
        f"since step {steps_T[0]} the updates have done little but shrink the weights, by {100 * shrunk:.2g} %, and "
        f"the loss is {newest:.4g}",
        (
            Quantity(key=INWARD, label="fall of a matrix's norm / length of its path, median", value=found),
            Quantity(key="weight.l2.shrunk_frac", label="fall of the norm", value=shrunk, unit="0..1"),
            *loss_evidence(history),
        ),
        since=int(steps_T[0]),
        severity=Severity.WARNING if measures_success(history) else Severity.INFO,
    )


def _inward_shares(steps_T: Steps, ratio_TW: Floats, norm_TW: Floats) -> Floats:
    """Return the fall of the norm of each matrix over the length of its path, nan where that was not measured."""
    length_TW = ratio_TW * norm_TW
    # trapezoids: the updates between two measurements are as long as these on average
    path_W = np.diff(steps_T) @ ((length_TW[1:] + length_TW[:-1]) / 2)
    # a matrix that some of the updates left out may have moved at the steps between
    is_told_W = (ratio_TW > 0).all(axis=0) & (path_W > ROUNDING * norm_TW[0])
    with np.errstate(invalid="ignore", divide="ignore"):
        share_W: Floats = np.where(is_told_W, (norm_TW[0] - norm_TW[-1]) / path_W, np.nan)
    return share_W
