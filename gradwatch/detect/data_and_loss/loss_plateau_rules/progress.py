"""Measure where the loss is and whether it may still fall: shared parts of the plateau mechanisms."""

# T = steps of a window, W = weight matrices and embeddings

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.features.baseline import baseline_loss, first_loss, first_steps, newest_loss
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median, slope, trend
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import ADVERSARY, EMBEDDING_PRODUCT
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

WINDOW_STEPS = 48
"""Newest steps that show where the loss is."""

MAX_LOSS_RATIO = 2.0
"""Loss, in units of the largest of the first steps, above which it grows and so is no plateau. The largest counts
because the median is low if the first batches are of one kind."""

MAX_SINGLE_LOSS_FRAC = 0.5
"""Fraction of the first loss below which a single newest loss shows that the model has learned some batches."""

MIN_RATE_GROWTH = 1.01
"""Growth of the learning rate over half of the window that shows a warm-up."""

MIN_NORM_TREND = 4.0
"""Slope of the gradient norm, in standard errors, at which a plateau is about to end."""

MIN_WEIGHT_GROWTH = 1.1
"""Growth of the weights over the window that shows learning. Runs that learned nothing grew by 1 to 2 %, matrix
factorizations that leave a saddle by 25 % and more."""

MIN_TRAVEL = 0.1
"""Sum of the update/weight ratios of the window below which a loss that stands still is no evidence: the weights have
moved by less than a tenth of themselves, so most of what they compute is what they were initialized to."""

WINDOWS_AHEAD = 4
"""Future windows in which a trend must bring a fall that counts. A network that memorizes random labels, its biases
first, falls steadily and by 0.1 %."""

MIN_TREND_STEPS = 3
"""Minimum number of steps in a trend with an error: a line fits two steps exactly."""


def loss_evidence(history: History) -> tuple[Quantity, ...]:
    """Return the first and the newest loss, and the number of steps between them."""
    return (
        Quantity(key="loss.first", label="loss, first 16 steps", value=first_loss(history)),
        Quantity(key="loss.newest", label="loss, newest 48 steps", value=newest_loss(history, WINDOW_STEPS)),
        Quantity(key="steps", value=float(history.step), unit="steps"),
    )


def make_sign(history: History, why: str, *, since: int | None = None) -> Sign:
    """Return the sign of a loss that has stood still since a step, with the reason why that loss is too high.

    The sign is for information if the loss is the value of a game between several learners, which may stand still, or
    if the weights have hardly moved, so that the model may only be slow.
    """
    text = f"the loss is {newest_loss(history, WINDOW_STEPS):.4g} after {history.step} steps; {why}"
    is_game = "+" in history.info.optimizer or any(events_of(history, ADVERSARY))
    moved = _travel(history)
    if moved < MIN_TRAVEL:  # False for nan: not measured
        how_far = f"by at most {100 * moved:.1g} %, so it may only be slow" if moved else "by nothing"
        text += f"; the weights have moved {how_far}"
    return Sign(text, loss_evidence(history), since, severity=Severity.INFO if is_game or moved < MIN_TRAVEL else None)


def _travel(history: History) -> float:
    """Return the sum of the update/weight ratios over the window, median over weights; nan if none was measured."""
    ratio_TW = history.param.window("update.ratio")[:, structure_of(history).rate_weights.indices_W]
    is_known_T = ~np.isnan(ratio_TW).all(axis=1)
    if not is_known_T.any():
        return math.nan
    # each measured ratio stands for the steps up to the next
    steps_T = np.diff(history.param.steps()[is_known_T], append=history.step)
    return float(median(np.nan_to_num(ratio_TW[is_known_T]).T @ steps_T))


def has_fallen(history: History, *, fall: float) -> bool:
    """Return whether the loss has fallen by a fraction since the start, or cannot fall by a fraction."""
    # of the baseline, not the first loss: a fall to chance level is no progress
    least = (1 - fall) * baseline_loss(history)[0]
    lowest = np.fmin.reduce(history.scalar("loss", WINDOW_STEPS))
    return bool(least <= 0 or newest_loss(history, WINDOW_STEPS) < least or lowest < MAX_SINGLE_LOSS_FRAC * least)


def is_standing(history: History, since: int, *, fall: float, max_trend: float, is_slow: bool) -> bool:
    """Return whether the loss stands still while neither the gradients nor the weights announce progress.

    Args:
        history: History of the run.
        since: Step at which the trend starts to count.
        fall: Fall of the loss, as a fraction, that counts as a fall.
        max_trend: Slope of the loss, in standard errors, below which the loss is falling.
        is_slow: Count a trend as a fall however small the fall would be, because the run may start slowly.
    """
    is_recent_T = history.run.steps() >= since
    loss_T, norm_T = history.scalar("loss")[is_recent_T], history.scalar("grad_norm.before_clip")[is_recent_T]
    if len(loss_T) < MIN_TREND_STEPS:  # thinning has left too few steps
        return False
    rate_T = history.scalar("lr.0")
    is_warming_up = rate_T[-1] > MIN_RATE_GROWTH * rate_T[len(rate_T) // 2]
    # skipped updates cannot lower the loss, whatever the model could learn
    is_skipping = (history.scalar("skipped", WINDOW_STEPS) == 1).any()
    if is_warming_up or is_skipping or not (np.isfinite(loss_T).all() and np.isfinite(norm_T).all()):
        return False
    if not newest_loss(history, WINDOW_STEPS) <= MAX_LOSS_RATIO * np.fmax.reduce(first_steps(history, "loss")):
        return False
    # extrapolates the trend over the next windows
    to_come = -slope(loss_T) * WINDOWS_AHEAD * len(loss_T)
    is_falling = trend(loss_T) < max_trend and (is_slow or to_come >= fall * abs(float(loss_T[0])))
    return not (is_falling or trend(norm_T) > MIN_NORM_TREND or _is_growing(history, since))


def _is_growing(history: History, since: int) -> bool:
    """Return whether most weight matrices and embeddings have grown since a step of the window.

    If rows of embeddings are multiplied, only the embeddings count: they leave a saddle before other weights move.
    """
    layers = history.info.layers
    is_product = any(events_of(history, EMBEDDING_PRODUCT))
    tables = [int(i) for i in structure_of(history).embeddings_E if is_product and layers[i].shape[-1] > 1]
    wide = tables or [i for i, layer in enumerate(layers) if layer.trainable and len(layer.shape) >= 2]
    norm_TW = history.param.window("weight.l2")[history.param.steps() >= since][:, wide]
    # weight norms are measured at some steps only
    norm_TW = norm_TW[~np.isnan(norm_TW).all(axis=1)]
    return len(norm_TW) > 1 and bool(median(norm_TW[-1] - MIN_WEIGHT_GROWTH * norm_TW[0]) > 0)
