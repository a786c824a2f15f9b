"""Compute medians, levels and slopes that resist outliers and ignore missing values."""

# T = steps of a window, L = layers, M = points of a profile

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

MIN_EXPLAINED_FRAC = 0.75
"""Part of the variance of a profile that its least-squares line must explain to count as a line."""

MAX_STEP_FRAC = 0.7
"""Part of the rise of a profile that a single step may hold: a cliff has nearly all of it in one."""


def median(values_TL: Floats) -> Floats:
    """Return the median over time of each layer, ignoring nan.

    Sorting is several times faster than `np.nanmedian` on the few rows of a window.

    Args:
        values_TL: Values of shape (T, L) or (T,), T at least 1.

    Returns:
        Lower median of shape (L,) or (), nan where all values are nan.
    """
    sorted_TL: Floats = np.sort(values_TL, axis=0)  # nan comes last
    # fast path: without nan the middle row is the median of every column
    if not np.isnan(sorted_TL[-1]).any():
        middle_L: Floats = sorted_TL[(len(sorted_TL) - 1) // 2]
        return middle_L
    count_L = np.count_nonzero(~np.isnan(sorted_TL), axis=0)
    # a column of nan has count 0: row 0 is nan as well
    middle = np.maximum(count_L - 1, 0) // 2
    picked_L: Floats = np.take_along_axis(sorted_TL, np.expand_dims(middle, 0), axis=0)[0]
    return picked_L


def log10(values: Floats) -> Floats:
    """Return the decimal logarithm, or nan if a value is zero, negative or missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Floats = np.log10(values)
    return np.where(np.isfinite(logs), logs, np.nan)  # the log of 0 is -inf, which would break means


def block_medians(values_T: Floats, size: int) -> Floats:
    """Return the medians of successive blocks, the last of which ends at the newest value.

    Args:
        values_T: Values of shape (T,), T at least `size`.
        size: Values per block. The oldest values are left out if they fill no block.

    Returns:
        Medians of shape (T // size,), oldest first.
    """
    whole = len(values_T) // size * size
    return median(values_T[len(values_T) - whole :].reshape(-1, size).T)


def slope(values_M: Floats) -> float:
    """Return the least-squares slope of a profile per position. All values must be finite, M at least 2."""
    place_M, square = _places(len(values_M))
    return float(place_M @ values_M) / square


def monotone_rise(values_M: Floats) -> float:
    """Return the rise of a profile along its least-squares line, or 0 if the profile is not a line.

    A profile is a line if the fit explains three quarters of the variance and no single step holds 70 % of the rise.
    """
    rise, rest_M = slope(values_M), values_M - values_M.mean()
    variation = float(rest_M @ rest_M)
    # explained variation of a least-squares line: slope squared times the squares of the positions
    is_line = variation > 0 and rise**2 * _places(len(values_M))[1] > MIN_EXPLAINED_FRAC * variation
    whole = rise * (len(values_M) - 1)
    # the sign makes a fall of the profile count as a rise does
    largest = float(np.max(math.copysign(1, whole) * np.diff(values_M)))
    return whole if is_line and largest < MAX_STEP_FRAC * abs(whole) else 0.0


def slope_and_error(values_T: Floats) -> tuple[float, float]:
    """Return the least-squares slope of a series per position, and its standard error."""
    place_T, square = _places(len(values_T))
    rise = slope(values_T)
    rest_T = values_T - values_T.mean() - rise * place_T
    return rise, math.sqrt(float(rest_T @ rest_T) / (len(values_T) - 2) / square)  # 2: the fit uses up two degrees


def trend(values_T: Floats) -> float:
    """Return the least-squares slope of a series in standard errors. Beyond 2 or 3 it is not random."""
    rise, error = slope_and_error(values_T)
    # a series exactly on a line has no error: its slope is infinitely certain, or 0 if flat
    return rise / error if error > 0 else math.copysign(math.inf, rise) if rise else 0.0


@functools.lru_cache(maxsize=64)
def _places(count: int) -> tuple[Floats, float]:
    """Return `count` positions centered at zero, which callers must not change, and the sum of their squares."""
    place_M: Floats = np.arange(count) - (count - 1) / 2
    return place_M, float(place_M @ place_M)
