"""Judge by its size whether a batch is a part of the data: people choose batch sizes, not sizes of data sets."""

from __future__ import annotations

import math

from gradwatch.detect.features.events import events_of
from gradwatch.events import DERIVATIVE
from gradwatch.history.store import History

LBFGS = "LBFGS"
"""Optimizer with line searches that need the same batch at every step."""

ROUND_FACTORS = (8, 10, 25)
"""Factors of sizes that people choose; data sets of 34 or 178 samples have none of them."""

LARGE_SIZES = 64
"""The large sizes that people choose are multiples of it."""


def batch_size(history: History) -> float:
    """Return the number of samples of the newest batch, or nan if it is unknown."""
    return float(history.run.newest("samples_per_s")[0] * history.run.newest("step_ms")[0]) / 1e3


def are_points(history: History, *, most: int) -> bool:
    """Return whether a batch is points at which an equation must hold: the loss has derivatives by their coordinates.

    Args:
        history: History of the run.
        most: Maximum number of coordinates.
    """
    # runs of earlier versions did not record the width
    return any(event.values.get("width", math.inf) <= most for event in events_of(history, DERIVATIVE))


def is_surely_part(history: History, size: float, *, chosen: int, toy: int) -> bool:
    """Return whether a size is typical of batches only: above `toy`, up to `chosen`, a power of two, or 24, 48, 96."""
    if history.info.optimizer == LBFGS or not toy < size <= chosen:  # False for nan, an unknown size
        return False
    number = round(size)
    return number.bit_count() == 1 or (number % 8 == 0 and number % 10 > 0)


def may_be_part(history: History, size: float, *, chosen: int, small: int) -> bool:
    """Return whether a batch may be a part of the data, instead of all data or a batch that the optimizer needs.

    A single sample is all that a picture prior, an inversion or a new word for one concept is fitted to.

    Args:
        history: History of the run.
        size: Samples of the batch; nan if unknown.
        chosen: Samples up to which each round size may be chosen.
        small: Samples up to which each size may be chosen.
    """
    if history.info.optimizer == LBFGS:
        return False
    if math.isnan(size):
        return True
    number = round(size)
    is_round = 1 < number <= small or any(number % factor == 0 for factor in ROUND_FACTORS)
    return is_round and (size <= chosen or number % LARGE_SIZES == 0)
