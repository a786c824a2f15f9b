"""Two kinds of batches that come in turn, a stretch of each: the loss jumps at each change, gradients turn about."""

# T = steps of a window, L = parameter tensors, P = stretches

from __future__ import annotations

import numpy as np

from gradwatch.detect._robust import Floats, median

STRETCHES = 4
"""Jumps in equal distances at which it is no chance any more."""

TIMES = 8
"""How often gradients must have turned to and fro within a window."""

LONGEST = 24
"""Steps of the longest stretch: longer ones are tasks of their own, as in continual learning."""

SHORTEST = 3
"""Steps of the shortest one within which a loss falls and is seen to."""


def stretch(loss_T: Floats, *, high: float, low: float) -> int | None:
    """Return how many steps lie between the jumps of a loss, where all do lie equally far apart.

    Args:
        loss_T: Losses of successive steps, of shape (T,).
        high: Loss that each jump reaches in one step.
        low: Loss below which it was the step before.
    """
    jumps_P = np.flatnonzero((loss_T[1:] >= high) & (loss_T[:-1] < low)) + 1
    if len(jumps_P) < STRETCHES:
        return None
    apart_P = np.diff(jumps_P)
    length = int(apart_P[0])
    is_even = bool((apart_P == length).all()) and SHORTEST <= length <= LONGEST
    lasts = jumps_P[0] < 2 * length and len(loss_T) - jumps_P[-1] <= length  # from one end of the window to the other
    return length if is_even and lasts else None


def turning(mean_TL: Floats, l2_TL: Floats, numel_L: Floats) -> tuple[int, float]:
    """Return after how many steps gradients point the other way most, and the same way again after twice as many.

    The mean of a gradient's elements, in units of their root mean square, is the cosine of its angle with a fixed
    direction: of random batches it is noise, of two sources that pull in opposite ways it is not.

    Args:
        mean_TL: Mean of the elements of each gradient, of shape (T, L).
        l2_TL: Their norms.
        numel_L: Their numbers.

    Returns:
        The number of steps, and the correlation at twice that distance minus that at it: 2 at most, and of random
        batches 0 with a standard deviation of the root of 2 / T or less, as the median over tensors.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_TL = mean_TL.astype(np.float64) * np.sqrt(numel_L) / l2_TL
    is_known_L = np.isfinite(cosine_TL).all(axis=0) & (numel_L > 1)
    cosine_TL = cosine_TL[:, is_known_L] - cosine_TL[:, is_known_L].mean(axis=0)
    power_L = np.square(cosine_TL).mean(axis=0)
    cosine_TL = cosine_TL[:, power_L > 0] / np.sqrt(power_L[power_L > 0])
    length = len(cosine_TL)
    if not cosine_TL.shape[1]:
        return 1, 0.0
    halves = range(1, length // TIMES // 2 + 1)
    lags = range(1, 2 * halves[-1] + 1)
    agree = [float(median((cosine_TL[k:] * cosine_TL[: length - k]).mean(axis=0))) for k in lags]
    best = max(halves, key=lambda k: agree[2 * k - 1] - agree[k - 1])
    same, other = agree[2 * best - 1], agree[best - 1]
    return best, same - other if same > 0 > other else 0.0
