"""Compute how far the weights move per step, relative to their norm."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured, first_measured_row, first_steps
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.store import History

BASELINE_STEPS = 8
"""Number of first steps in the median loss of the start."""

LOSS_STEPS = 16
"""Number of newest steps in the median loss."""


def update_levels(history: History, *, spread: float) -> Floats:
    """Return the update/weight ratio of each step of the window, of shape (T,); nan if it was not measured.

    For embeddings, the ratio refers to the rows that the batch looked up.

    Args:
        history: History of the run.
        spread: Ratio of the largest update to the median up to which all layers move alike.
    """
    indices_W = structure_of(history).rate_weights.indices_W
    ratio_TW, zero_TW = (history.param.window(name)[:, indices_W] for name in ("update.ratio", "grad.zero_frac"))
    return level_of(history, ratio_TW, zero_TW, spread=spread)


def level_of(history: History, ratio_TW: Floats, zero_frac_TW: Floats, *, spread: float) -> Floats:
    """Return the update/weight ratio of each of some steps, of shape (T,); nan if it was not measured.

    Args:
        history: History of the run.
        ratio_TW: `update.ratio` of the weights.
        zero_frac_TW: `grad.zero_frac` of the weights.
        spread: As in `update_levels`.
    """
    ratio_TW = ratio_TW * _is_known(history)
    if len(structure_of(history).matrices.indices_M):
        return _level(ratio_TW, spread)
    # rows that were not read do not move
    return _level(ratio_TW / np.sqrt(np.where(zero_frac_TW < 1, 1 - zero_frac_TW, np.nan)), spread)


def group_levels(history: History, tensors: list[int]) -> Floats:
    """Return the largest update/weight ratio of some tensors at each step of the window; nan if it was not measured."""
    level_T: Floats = np.fmax.reduce(history.param.window("update.ratio")[:, tensors], axis=1)
    return level_T


def may_learn(history: History) -> bool:
    """Return whether an optimizer holds parameters of the model, and a weight has a gradient."""
    is_held = any(layer.group is not None for layer in history.info.layers)
    return is_held and bool((history.param.newest("grad.l2")[structure_of(history).rate_weights.indices_W] > 0).any())


def is_gradient_gone(history: History, newest_level: float, *, gone: float, spread: float) -> bool:
    """Return whether updates are below `gone` of the first one at the same rate, so that the rate is not the cause."""
    row = first_measured_row(history, "update.ratio")
    first_W = first_steps(history, "update.ratio")[row : row + 1, structure_of(history).rate_weights.indices_W]
    first_level = _level(first_W * _is_known(history), spread)[0]
    first_rate, rate = first_steps(history, "lr.0")[row], history.run.newest("lr.0")[0]
    return bool(newest_level * first_rate < gone * first_level * rate)


def is_loss_left(history: History, *, left: float) -> bool:
    """Return whether the loss is above the fraction `left` of its start."""
    first = float(median(first_steps(history, "loss", BASELINE_STEPS)))
    return float(median(history.scalar("loss", LOSS_STEPS))) > left * first


def _level(ratio_TW: Floats, spread: float) -> Floats:
    """Return the median ratio of each step, or the largest ratio / `spread` if that is more."""
    level_T: Floats = np.fmax(median(ratio_TW.T), np.fmax.reduce(ratio_TW, axis=1) / spread)
    return level_T


def _is_known(history: History) -> Floats:
    """Return 1 for weights with a meaningful ratio, and nan for weights that started near zero: shape (W,)."""
    structure = structure_of(history)
    first_W = first_measured(history, "weight.l2")[structure.rate_weights.indices_W]
    least = NEAR_ZERO_GAIN if len(structure.matrices.indices_M) else 0
    return np.where(first_W > least * structure.rate_weights.unit_norm_W, 1, np.nan)
