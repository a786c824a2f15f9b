"""Find a loss that stays far above the first loss while updates are large."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

MIN_MEASUREMENTS = 3
"""Measurements of large updates in a row that a report needs."""

WINDOW_STEPS = 20
"""Steps of the median loss: single batches are noisy."""


def find_loss_above_start(history: History, *, above_start: float, large: float) -> Sign | None:
    """Return the sign of a median loss of `above_start` first losses, if updates are at least `large`."""
    first = float(first_steps(history, "loss", 1)[0])
    # cheap: one number rules out most steps
    if not history.run.newest("loss")[0] > above_start * first > 0:
        return None
    structure, loss_T = structure_of(history), history.scalar("loss", WINDOW_STEPS)
    ratio_TW = history.param.window("update.ratio")[:, structure.rate_weights.indices_W]
    measured_T = np.flatnonzero(~np.isnan(ratio_TW).all(axis=1))[-MIN_MEASUREMENTS:]
    has_enough = len(loss_T) >= WINDOW_STEPS and len(measured_T) >= MIN_MEASUREMENTS
    if not has_enough or not float(median(loss_T)) >= above_start * first:
        return None
    gain_W = (
        history.param.window("weight.l2")[measured_T[-1], structure.rate_weights.indices_W]
        / structure.rate_weights.unit_norm_W
    )
    # matrices that start near zero are replaced by any update
    ratio_T = median(np.where(gain_W > NEAR_ZERO_GAIN, ratio_TW[measured_T], np.nan).T)
    if not ratio_T.min() >= large:  # False for nan: matrices that began near zero
        return None
    rate, times = float(history.run.newest("lr.0")[0]), float(median(loss_T)) / first
    return Sign(
        f"the loss is {format_factor(times)} times the initial loss, at a learning rate of {rate:g}",
        (
            Quantity(key="loss.by_first", label="loss / first loss", value=times),
            Quantity(
                key="update.ratio.smallest_median",
                label="smallest of 3 median update.ratio",
                value=float(ratio_T.min()),
            ),
            Quantity(key="lr.0", value=rate),
        ),
    )
