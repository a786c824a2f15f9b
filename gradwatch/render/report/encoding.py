"""Encode long series in few bytes: thinned without losing spikes, as 16-bit codes, compressed, in base64."""

# T = recorded steps, L = rows of a table, W = columns of the report

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Codes = NDArray[np.uint16]
Steps = NDArray[np.int64]

MISSING, ZERO, INFINITE, NAN = 0, 1 << 15, (1 << 16) - 2, (1 << 16) - 1
"""Special codes. All other codes lie around `ZERO` in the order of their values."""
MOST_LEVEL = ZERO - 4  # keeps the codes of all levels, of either sign, below the special codes
FINEST = 0.002
"""Minimum distance of two levels on a log scale, in powers of ten. A decoded value is off by at most 0.23 %."""
FRACTION_STEP = 1 / 4096
"""Minimum distance of two levels on the linear scale of fractions."""


@final
@dataclass(frozen=True, slots=True)
class CodeScale:
    """The scale to decode the numbers of a statistic.

    A code `ZERO + 1 + k` stands for the level `low + k * step`: the exponent of a power of ten if `log`, else the value
    itself. A code `ZERO - 1 - k` stands for the negative value. Values are rounded to the nearest level, and only 0 has
    the code `ZERO`.

    Args:
        log: Whether levels are powers of ten.
        low: Lowest level.
        step: Distance of two levels.
    """

    log: bool
    low: float
    step: float


@final
@dataclass(frozen=True, slots=True)
class Bins:
    """Columns of successive recorded steps.

    Args:
        first_W: Index of the first row of each column.
        steps_W: Step of the first row of each column.
        last_W: Step of the last row of each column.
    """

    first_W: NDArray[np.int64]
    steps_W: Steps
    last_W: Steps

    @property
    def are_steps(self) -> bool:
        """Whether each column is a single row."""
        return bool((self.steps_W == self.last_W).all())


def bins(steps_T: Steps, most: int) -> Bins:
    """Divide recorded steps into at most `most` columns.

    One half of the columns is spread evenly over the steps, the other half over the recorded rows. So columns are
    narrow where the history keeps every step: at the beginning, at the end and around findings.
    """
    if len(steps_T) <= most:
        return Bins(np.arange(len(steps_T)), steps_T, steps_T)
    time_T = (steps_T - steps_T[0]) / (steps_T[-1] - steps_T[0] + 1)
    column_T = ((time_T + np.arange(len(steps_T)) / len(steps_T)) / 2 * most).astype(np.int64)
    first_W = np.flatnonzero(np.diff(column_T, prepend=-1))
    last_W = np.append(first_W[1:], len(steps_T)) - 1
    return Bins(first_W, steps_T[first_W], steps_T[last_W])


def encode(values_TL: Floats, *, missing_TL: NDArray[np.bool_], log: bool) -> tuple[Codes, CodeScale]:
    """Return the code of every value, and the scale to decode it.

    Args:
        values_TL: Values; a nan that is not missing is a measured NaN.
        missing_TL: Mask of the missing values.
        log: Whether levels are powers of ten, not linear.
    """
    size_TL = np.abs(values_TL)
    usable_TL = np.isfinite(size_TL) & (size_TL > 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # log10 of 0 and nan: not usable, so overwritten below
        height_TL = np.log10(size_TL) if log else size_TL
    low = float(height_TL.min(where=usable_TL, initial=np.inf)) if log else 0.0
    high = float(height_TL.max(where=usable_TL, initial=-np.inf))
    # without a usable value, the limits are infinite
    low, high = (low, high) if math.isfinite(low) and math.isfinite(high) else (0.0, 0.0)
    scale = CodeScale(log, low, max(FINEST if log else FRACTION_STEP, (high - low) / MOST_LEVEL))
    # + 1: the lowest level must not share the code of 0
    level_TL = np.rint((np.where(usable_TL, height_TL, low) - low) / scale.step).astype(np.int32) + 1
    codes_TL = np.where(usable_TL, ZERO + np.where(values_TL < 0, -level_TL, level_TL), ZERO)
    codes_TL[np.isinf(values_TL)] = INFINITE
    codes_TL[np.isnan(values_TL)] = NAN
    codes_TL[missing_TL] = MISSING  # after NaN: missing values are nan too
    return codes_TL.astype(np.uint16), scale


def thin(codes_TL: Codes, columns: Bins) -> tuple[Codes, Codes, Codes]:
    """Return the minimum, the median and the maximum code of each column, each of shape (W, L).

    The median is over the finite values. Missing values are ignored. In a column with NaN or Inf, the maximum is
    `INFINITE` or `NAN`. In a column without a finite value, all three are.
    """
    shape = (len(columns.first_W), codes_TL.shape[1])
    low_WL, mid_WL, high_WL = (np.empty(shape, np.uint16) for _ in range(3))
    ends = np.append(columns.first_W[1:], len(codes_TL))
    layer_L = np.arange(shape[1])
    for w, (first, end) in enumerate(zip(columns.first_W, ends, strict=True)):
        sorted_TL = np.sort(codes_TL[first:end], axis=0)
        # sorted codes: first MISSING, then finite values, then INFINITE and NAN
        missing_L = np.count_nonzero(sorted_TL == MISSING, axis=0)
        usable_L = np.count_nonzero(sorted_TL < INFINITE, axis=0) - missing_L
        lowest_L = np.minimum(missing_L, len(sorted_TL) - 1)
        low_WL[w] = sorted_TL[lowest_L, layer_L]
        mid_WL[w] = sorted_TL[lowest_L + np.maximum(usable_L - 1, 0) // 2, layer_L]
        high_WL[w] = sorted_TL[-1]
    return low_WL, mid_WL, high_WL


def planes(codes_TL: Codes, columns: Bins) -> bytes:
    """Return codes as bytes, thinned to columns, row by row.

    The medians come first. If a column has several steps, the differences median - minimum and maximum - median follow,
    modulo 2**16. In each of these blocks, all low bytes precede all high bytes, which compresses better.
    """
    if columns.are_steps:  # minimum and maximum equal the median
        return _split(codes_TL[columns.first_W].T)
    low_WL, mid_WL, high_WL = thin(codes_TL, columns)
    return b"".join(_split(plane_WL.T) for plane_WL in (mid_WL, mid_WL - low_WL, high_WL - mid_WL))


def deflated(data: bytes) -> str:
    """Compress bytes in the zlib format, and return them as base64."""
    return base64.b64encode(zlib.compress(data, level=6)).decode("ascii")


def _split(codes_LW: Codes) -> bytes:
    # little-endian on every machine: the page expects the low bytes first
    return np.ascontiguousarray(codes_LW).astype("<u2").reshape(-1).view(np.uint8).reshape(-1, 2).T.tobytes()
