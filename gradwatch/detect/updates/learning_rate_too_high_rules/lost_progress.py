"""Decide whether a run has lost its progress."""

# T = steps of a window

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.features.baseline import first_steps, newest_loss
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Severity

NON_FINITE = "non-finite"
"""Kind of a run with numbers that are no longer finite, a result of a learning rate that is too high."""

MEDIAN_STEPS = 6
"""Steps of the median loss: single batches are noisy."""


def is_lost(history: History, *, lost: float) -> bool:
    """Return whether the run is non-finite, or its loss is `lost` times the best and no lower than at the start."""
    if any(f.kind == NON_FINITE and f.severity == Severity.CRITICAL for f in history.findings):
        return True
    first, newest = float(median(first_steps(history, "loss", MEDIAN_STEPS))), newest_loss(history, MEDIAN_STEPS)
    return newest >= first > 0 and newest >= lost * best_loss(history) > 0


def is_learning(history: History, *, learned: float, learned_linear: float) -> bool:
    """Return whether `learned` of the loss before the first update is gone, or `learned_linear` in a linear model."""
    first = float(first_steps(history, "loss", 1)[0])
    part = learned if len(structure_of(history).matrices.indices_M) > 1 else learned_linear
    return newest_loss(history, MEDIAN_STEPS) < first - part * abs(first)


def best_loss(history: History) -> float:
    """Return the lowest block median of the loss, or nan if the run is shorter than a block."""
    loss_T = history["loss"]
    return float(np.fmin.reduce(block_medians(loss_T, MEDIAN_STEPS))) if len(loss_T) >= MEDIAN_STEPS else math.nan
