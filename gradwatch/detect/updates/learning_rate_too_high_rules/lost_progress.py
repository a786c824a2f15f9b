"""Decide whether a run has lost its progress."""

# T = steps of a window

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Severity

NON_FINITE = "non-finite"
"""Kind of a run with numbers that are no longer finite, a result of a learning rate that is too high."""

MEDIAN_STEPS = 6
"""Steps of the median loss: single batches are noisy."""

MIN_LEARNED_FRAC = 0.5
"""Part of the first loss that must be gone for growth to do no harm; predicting the target mean removes 1/3."""

MIN_LEARNED_FRAC_LINEAR = 0.1
"""Same part for a model of one matrix, in which the initial weights hold nothing worth keeping."""


def is_lost(history: History, *, lost: float) -> bool:
    """Return whether the run is non-finite, or its loss is `lost` times the best and no lower than at the start."""
    if any(f.kind == NON_FINITE and f.severity == Severity.CRITICAL for f in history.findings):
        return True
    first, newest = float(median(first_steps(history, "loss", MEDIAN_STEPS))), newest_loss(history)
    return newest >= first > 0 and newest >= lost * best_loss(history) > 0


def is_learning(history: History) -> bool:
    """Return whether the loss has fallen well below the loss before the first update."""
    first = float(first_steps(history, "loss", 1)[0])
    part = MIN_LEARNED_FRAC if len(structure_of(history).matrices.indices_M) > 1 else MIN_LEARNED_FRAC_LINEAR
    return newest_loss(history) < first - part * abs(first)


def newest_loss(history: History) -> float:
    return float(median(history.scalar("loss", MEDIAN_STEPS)))


def best_loss(history: History) -> float:
    """Return the lowest block median of the loss, or nan if the run is shorter than a block."""
    loss_T = history["loss"]
    return float(np.fmin.reduce(block_medians(loss_T, MEDIAN_STEPS))) if len(loss_T) >= MEDIAN_STEPS else math.nan
