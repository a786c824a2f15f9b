"""Updates that are too large beside the weights they move, and what the loss makes of them."""

# T = steps of a window, W = weight matrices and kernels, or embeddings where there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

SAMPLES = 3
"""Measurements of updates in a row that must be large."""

SPAN = 20
"""Steps over which growth is measured: two samples of the weights at the default schedule."""

HARMED = 1.05
"""Loss after an update, in units of that before, from which on it is worse: where nothing has been learned yet, as at a
cold start of embeddings, batches alone make a hundredth."""

CLIMB = 4
"""Steps in a row at which a loss that runs away has risen: noise does so once in 120 times."""

DEFAULT = 0.577
"""The same for the default initialisation of linear layers and convolutions, uniform within 1 / root of the inputs."""


def replaced(history: History, *, ratio: float, every: int) -> Sign | None:
    """Return that an update of the last `every` steps was `ratio` times as large as the weights, and did harm."""
    structure, age = structure_of(history), min(every + 1, len(history.param.steps(every + 1)))
    ratio_TW = history.param.window("update.ratio", age)[:, structure.rate_weights.indices_W]
    over_T = 2 * np.count_nonzero(ratio_TW >= ratio, axis=1) >= len(structure.rate_weights.indices_W)
    if not over_T.any():
        return None
    at = int(np.argmax(over_T))
    gain_W = (
        history.param.window("weight.l2", age)[at, structure.rate_weights.indices_W]
        / structure.rate_weights.unit_norm_W
    )
    found = float(median(np.where(gain_W > NEAR_ZERO_GAIN, ratio_TW[at], np.nan)))
    loss_T = history.scalar("loss", age)
    harmful = loss_T[at] + (HARMED - 1) * abs(loss_T[at])
    is_worse = age - at > 3 and not float(median(loss_T[at + 1 :])) < harmful
    if not ratio <= found < np.inf or not (is_worse or found >= 10 * ratio):
        return None
    rate = float(history.run.newest("lr.0")[0])
    return Sign(
        f"one update at a learning rate of {rate:g} is {format_factor(found)} times as large as the weights it moves",
        (
            Quantity(key="update.ratio.median", label="update.ratio, median", value=found),
            Quantity(key="lr.0", value=rate),
        ),
        since=int(history.param.steps(age)[at]),
    )


def overshot(history: History, *, above_start: float, large: float) -> Sign | None:
    """Return that updates are large, and have left the loss far above where it was before the first."""
    first, loss_T = float(first_steps(history, "loss", 1)[0]), history.scalar("loss", SPAN)
    structure = structure_of(history)
    ratio_TW = history.param.window("update.ratio")[:, structure.rate_weights.indices_W]
    measured_T = np.flatnonzero(~np.isnan(ratio_TW).all(axis=1))[-SAMPLES:]
    if len(loss_T) < SPAN or len(measured_T) < SAMPLES or not float(median(loss_T)) >= above_start * first:
        return None
    gain_W = (
        history.param.window("weight.l2")[measured_T[-1], structure.rate_weights.indices_W]
        / structure.rate_weights.unit_norm_W
    )
    ratio_T = median(np.where(gain_W > NEAR_ZERO_GAIN, ratio_TW[measured_T], np.nan).T)
    if not ratio_T.min() >= large:  # nan, of matrices that started near zero, is not
        return None
    rate, times = float(history.run.newest("lr.0")[0]), float(median(loss_T)) / first
    return Sign(
        f"the loss is {format_factor(times)} times that before the first update, at a learning rate of {rate:g}",
        (
            Quantity(key="loss.by_first", label="loss in units of the first", value=times),
            Quantity(
                key="update.ratio.smallest_median",
                label="update.ratio, median, smallest of 3",
                value=float(ratio_T.min()),
            ),
            Quantity(key="lr.0", value=rate),
        ),
    )


def ran_away(history: History, *, runaway: float, large: float) -> Sign | None:
    """Return that the loss has done nothing but climb since the first update, which was large, if need be until NaN."""
    structure, loss_T = structure_of(history), history.scalar("loss", SPAN)
    loss_T = loss_T[: np.argmin(np.append(np.isfinite(loss_T), False))]
    if len(loss_T) <= CLIMB or not loss_T[-1] >= runaway * loss_T[0] > 0:
        return None
    ratio = float(
        np.fmax.reduce(first_steps(history, "update.ratio", 1)[0, structure.rate_weights.indices_W], initial=-np.inf)
    )
    if not (np.diff(loss_T[-CLIMB - 1 :]) > 0).all() or not ratio >= large:
        return None
    rate, times = float(history.run.newest("lr.0")[0]), float(loss_T[-1] / loss_T[0])
    return Sign(
        f"the loss has climbed {format_factor(times)} times since the first update, at a learning rate of {rate:g}",
        (
            Quantity(key="loss.by_first", label="loss in units of the first", value=times),
            Quantity(key="update.ratio.first_max", label="update.ratio of the first update, largest", value=ratio),
            Quantity(key="lr.0", value=rate),
        ),
        since=int(history.run.steps(SPAN)[len(loss_T) - 1]) - CLIMB,
    )


def grown(history: History, *, growth: float) -> Sign | None:
    """Return that the weights have grown by so many powers of ten within the last 20 steps."""
    structure = structure_of(history)
    norm_TL = history.param.window("weight.l2", SPAN + 1)
    at = 0 if norm_TL[0, structure.rate_weights.indices_W[0]] >= 0 else int(np.argmax(~np.isnan(norm_TL).all(axis=1)))
    first_W, last_W = norm_TL[at, structure.rate_weights.indices_W], norm_TL[-1, structure.rate_weights.indices_W]
    if 2 * np.count_nonzero(last_W > 10**growth * first_W) < len(first_W):
        return None
    gain_W = first_W / structure.rate_weights.unit_norm_W  # near 1 for weights that keep the size of the signal
    usual_W = np.maximum(first_W, DEFAULT * structure.rate_weights.unit_norm_W)
    counts_W = (gain_W > NEAR_ZERO_GAIN) | (
        len(structure.matrices.indices_M) == 0
    )  # embeddings begin near zero where they are all there is
    found = float(median(np.where(counts_W, log10(last_W) - log10(usual_W), np.nan)))
    if not growth <= found < np.inf:
        return None
    rate = float(history.run.newest("lr.0")[0])
    ratio = float(median(history.param.newest("update.ratio")[structure.rate_weights.indices_W]))
    return Sign(
        f"the weights grew {format_factor(10**found)} times within {SPAN} steps at a learning rate of {rate:g}",
        (
            Quantity(key="weight.l2.growth_decades", label="growth of weight.l2, median", value=found, unit="decades"),
            Quantity(key="update.ratio.median", label="update.ratio, median", value=ratio),
            Quantity(key="lr.0", value=rate),
        ),
        since=history.step - 1,  # what weights are before an update does not follow from its gradient
    )
