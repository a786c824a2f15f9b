"""Measure where the loss is and whether it may still fall: shared parts of the plateau mechanisms."""

# T = steps of a window, W = weight matrices and embeddings

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.features.baseline import baseline_loss, first_loss, first_steps, newest_loss
from gradwatch.detect.features.events import events_of, measures_success, was_trained
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median, slope, trend
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import EMBEDDING_PRODUCT
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

WINDOW_STEPS = 48
"""Newest steps that show where the loss is."""

MIN_TREND_STEPS = 3
"""Minimum number of steps in a trend with an error: a line fits two steps exactly."""


def loss_evidence(history: History) -> tuple[Quantity, ...]:
    """Return the first and the newest loss, and the number of steps between them."""
    return (
        Quantity(key="loss.first", label="loss, first 16 steps", value=first_loss(history)),
        Quantity(key="loss.newest", label="loss, newest 48 steps", value=newest_loss(history, WINDOW_STEPS)),
        Quantity(key="steps", value=float(history.step), unit="steps"),
    )


def make_sign(history: History, why: str, *, travel: float, since: int | None = None) -> Sign:
    """Return the sign of a loss that has stood still, with the reason why that loss is too high.

    The sign is for information if the loss may stand still or rise while the model learns, or if the weights have
    hardly moved, so that the model may only be slow.

    Args:
        history: History of the run.
        why: End of the message.
        travel: Sum of the update/weight ratios of the window below which the weights have hardly moved.
        since: Step since which the loss has stood still, or None if it is unknown.
    """
    text = f"the loss is {newest_loss(history, WINDOW_STEPS):.4g} after {history.step} steps; {why}"
    moved = _travel(history)
    is_slow = moved < travel  # False for nan: not measured
    if is_slow:
        how_far = f"by at most {100 * moved:.1g} %, so it may only be slow" if moved else "by nothing"
        text += f"; the weights have moved {how_far}"
    if was_trained(history):
        text += "; the model was trained before"
    severity = None if measures_success(history) and not is_slow else Severity.INFO
    return Sign(text, loss_evidence(history), since, severity=severity)


def _travel(history: History) -> float:
    """Return the sum of the update/weight ratios over the window, median over weights; nan if none was measured."""
    ratio_TW = history.param.window("update.ratio")[:, structure_of(history).rate_weights.indices_W]
    is_known_T = ~np.isnan(ratio_TW).all(axis=1)
    if not is_known_T.any():
        return math.nan
    # each measured ratio stands for the steps up to the next
    steps_T = np.diff(history.param.steps()[is_known_T], append=history.step)
    return float(median(np.nan_to_num(ratio_TW[is_known_T]).T @ steps_T))


def has_fallen(history: History, *, fall: float, single: float) -> bool:
    """Return whether the loss has fallen by a fraction since the start, or cannot fall by a fraction.

    Args:
        history: History of the run.
        fall: Fall of the loss, as a fraction, that counts as a fall.
        single: A single newest loss, in units of the largest fallen one, that counts as a fall.
    """
    # of the baseline, not the first loss: a fall to chance level is not progress
    least = (1 - fall) * baseline_loss(history)[0]
    lowest = np.fmin.reduce(history.scalar("loss", WINDOW_STEPS))
    return bool(least <= 0 or newest_loss(history, WINDOW_STEPS) < least or lowest < single * least)


def is_level(history: History, since: int, *, growth: float, max_trend: float, fall: float | None, ahead: int) -> bool:
    """Return whether the loss neither grows nor falls.

    Args:
        history: History of the run.
        since: Step at which the trend starts to count.
        growth: Newest loss, in units of the largest of the first steps, above which the loss grows.
        max_trend: Slope of the loss, in standard errors, below which the loss is falling.
        fall: Fall of the loss, as a fraction, that a falling trend must bring, or None if any falling trend counts.
        ahead: Future windows in which it must bring it.
    """
    loss_T = history.scalar("loss")[history.run.steps() >= since]
    # thinning may have left too few steps
    if len(loss_T) < MIN_TREND_STEPS or not np.isfinite(loss_T).all():
        return False
    if not newest_loss(history, WINDOW_STEPS) <= growth * np.fmax.reduce(first_steps(history, "loss")):
        return False
    # extrapolates the trend over the next windows
    to_come = -slope(loss_T) * ahead * len(loss_T)
    return not (trend(loss_T) < max_trend and (fall is None or to_come >= fall * abs(float(loss_T[0]))))


def is_held_back(history: History, *, rate_growth: float) -> bool:
    """Return whether the learning rate has grown by a factor over half of the window, or updates are skipped."""
    rate_T = history.scalar("lr.0")
    is_warming_up = rate_T[-1] > rate_growth * rate_T[len(rate_T) // 2]
    # skipped updates cannot lower the loss, whatever the model could learn
    return bool(is_warming_up or (history.scalar("skipped", WINDOW_STEPS) == 1).any())


def may_leave_saddle(history: History, since: int, *, norm_trend: float, weight_growth: float) -> bool:
    """Return whether the gradients or the weights grow, or a gradient norm is not finite and so cannot tell.

    Args:
        history: History of the run.
        since: Step at which growth starts to count.
        norm_trend: Slope of the gradient norm, in standard errors, above which it grows.
        weight_growth: Growth of the weights, as a factor, that counts.
    """
    norm_T = history.scalar("grad_norm.before_clip")[history.run.steps() >= since]
    if not np.isfinite(norm_T).all():
        return True
    return trend(norm_T) > norm_trend or _are_growing(history, since, growth=weight_growth)


def _are_growing(history: History, since: int, *, growth: float) -> bool:
    """Return whether most weight matrices and embeddings have grown by a factor since a step of the window.

    If rows of embeddings are multiplied, only the embeddings count: they leave a saddle before other weights move.
    """
    layers = history.info.layers
    is_product = any(events_of(history, EMBEDDING_PRODUCT))
    tables = [int(i) for i in structure_of(history).embeddings_E if is_product and layers[i].shape[-1] > 1]
    wide = tables or [i for i, layer in enumerate(layers) if layer.trainable and len(layer.shape) >= 2]
    norm_TW = history.param.window("weight.l2")[history.param.steps() >= since][:, wide]
    # weight norms are measured at some steps only
    norm_TW = norm_TW[~np.isnan(norm_TW).all(axis=1)]
    return len(norm_TW) > 1 and bool(median(norm_TW[-1] - growth * norm_TW[0]) > 0)
