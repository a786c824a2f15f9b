"""Share one error budget among all tests, which run again and again, and add up evidence over blocks of steps."""

# B = blocks of steps

from __future__ import annotations

import enum
from statistics import NormalDist

import numpy as np

from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import WINDOW, History

ALPHA = 0.05
"""Probability, at most, that any test of any detector is wrong in a run of any length."""


@enum.unique
class SequentialTest(enum.Enum):
    """The mechanisms that distinguish a fault from chance.

    All others report a fact, or an effect of some size that lasts.
    """

    VALIDATION_TREND = enum.auto()
    VALIDATION_RISE = enum.auto()
    LOSS_STALL = enum.auto()
    UNPAIRED_TARGETS = enum.auto()
    FADING_USE = enum.auto()
    LONG_ABSENCE = enum.auto()
    ALTERNATING_SOURCES = enum.auto()
    GRADIENT_SPIKE = enum.auto()


def allowed_error(test: SequentialTest, look: int, *, among: int = 1) -> float:
    """Return the probability of a false alarm that a test may spend at one look.

    The tests share `ALPHA` equally. Look k spends the fraction 1 / (k (k + 1)) of the share of its test, and the
    fractions of all looks, however many, sum to 1. By the union bound the whole never exceeds `ALPHA`, whatever the
    dependence among looks, tensors and tests (Demets and Lan 1994, on the spending of an error rate).

    Args:
        test: Which test.
        look: Number of the look, from 1.
        among: Number of statistics that are judged at this look, such as tensors; the largest of them counts.
    """
    return ALPHA / len(SequentialTest) / (look * (look + 1)) / among


def window_number(history: History) -> int:
    """Return the number of the window that the newest step is in, from 1: the look of tests that read a window."""
    return history.step // WINDOW + 1


def looks_in_window(every: int) -> int:
    """Return how often a test runs in a window if it runs every `every` steps."""
    return -(-WINDOW // every)  # rounded up


def critical_sigmas(error: float) -> float:
    """Return the standard deviations that a normal statistic exceeds with a given probability."""
    return -NormalDist().inv_cdf(error)


def aligned_blocks(values_T: Floats, first_step: int, size: int) -> Floats:
    """Return the medians of the whole blocks in a window. Blocks start at multiples of `size` from step 0.

    A sequential test must see each block once and unchanged. Blocks counted back from the newest step would differ at
    each call.

    Args:
        values_T: Values of successive steps, of shape (T,).
        first_step: Step of the first value.
        size: Steps per block. Incomplete blocks are left out.

    Returns:
        Medians of shape (B,), oldest first; B may be 0.
    """
    start = -first_step % size  # values before the first multiple of `size`
    whole = max(0, len(values_T) - start) // size * size
    return median(values_T[start : start + whole].reshape(-1, size).T) if whole else values_T[:0]


def stall_likelihood_ratio(values_B: Floats, *, rate: float) -> float:
    """Return the likelihood ratio of a stall to a fall, from the new lows of a series.

    In a series without direction, block i is the lowest so far with probability 1 / i. This holds for any distribution
    and independently of earlier blocks (Rényi 1962, "Théorie des éléments saillants d'une suite d'observations"). A
    series that falls sets a new low with probability `rate` or more each time. The product of the ratios of these
    probabilities is a supermartingale for falling series. By Ville's inequality, at most a fraction alpha of falling
    series ever reaches 1 / alpha, however often the test runs (Wald 1945, sequential probability ratio test; Ville
    1939).

    Args:
        values_B: A value per block, such as its median, of shape (B,).
        rate: Probability of a new low, 0.5 to 1, at which a series counts as falling.
    """
    if len(values_B) < 2:
        return 1.0  # no block has a predecessor yet: no evidence
    lowest_B = np.minimum.accumulate(values_B)
    is_low_B = values_B[1:] < lowest_B[:-1]
    # the first block is a low by definition, so blocks count from the second
    chance_B = 1 / np.arange(2, len(values_B) + 1)
    log_B = np.where(is_low_B, np.log(chance_B / rate), np.log((1 - chance_B) / (1 - rate)))
    return float(np.exp(log_B.sum()))  # logs: a product of many ratios would underflow
