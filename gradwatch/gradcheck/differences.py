"""Differentiate a function of one number by central differences: a sweep of steps, Richardson, kinks and jumps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

STEPS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-3, 1e-2)
"""Steps of the sweep, the most often sufficient one first, in units of the direction."""
FIRST_STEPS = (1e-6, 1e-7)
"""Steps at which a single central difference may agree with the expected derivative; kinks are rarely that close."""
SUFFICIENT_ERROR = 1e-7
"""Relative error at which the sweep ends."""
AGREEMENT_ERROR = 1e-5
"""Relative error, and distance from the expected derivative, at which the sweep ends too."""
NOISE_ULPS = 8
"""Error of a difference, in units in the last place of the function's value."""
KINK_STEPS = (1e-6, 5e-7, 1e-7)
KINK_FRAC = 1e-4
"""Minimum disagreement of the one-sided slopes at a kink, relative to the slope, if it does not shrink with the
step."""
STALLED_RATIO = 0.7
"""Ratio of the disagreements at a step and at its half above which they do not shrink; 0.5 is smooth."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A derivative from differences.

    Args:
        value: The derivative; nan if no value of the function was finite.
        error: Estimated absolute error.
        flat: Whether the function did not change at all at the shortest steps.
    """

    value: float
    error: float
    flat: bool = False


def slope(
    function: Callable[[float], float],
    *,
    typical: float,
    epsilon: float = sys.float_info.epsilon,
    noise: float = 0.0,
    expected: float = math.nan,
    unit: float = 1.0,
) -> Slope:
    """Return the derivative of a function at 0.

    Args:
        function: Function of the multiple of a direction.
        typical: Magnitude of the derivative at which the relative error counts.
        epsilon: Epsilon of the format that the function is computed in.
        noise: Measured noise of the function's value, an absolute number.
        expected: Derivative at which to end early, if it is found: a mistake would not agree with it.
        unit: Multiple of the direction that the steps are parts of; see `unit_of`.
    """
    # in float32, noise requires longer steps: with h ~ eps^(1/3), truncation and rounding are of one size
    factor = unit * (epsilon / sys.float_info.epsilon) ** (1 / 3)
    floor_of = _Floor(epsilon, noise)
    if math.isfinite(expected) and (agreed := _agreed(function, expected, typical, factor, floor_of)):
        return agreed
    best: Slope | None = None
    changes: dict[float, float] = {}
    for step in (s * factor for s in STEPS):
        high, low = function(step), function(-step)
        high_half, low_half = function(step / 2), function(-step / 2)
        values = (high, low, high_half, low_half)
        if not all(map(math.isfinite, values)):
            continue
        whole, half = (high - low) / (2 * step), (high_half - low_half) / step
        changes[step] = max(values) - min(values)
        value = (4 * half - whole) / 3
        error = max(abs(value - half), floor_of(step, *values))
        if best is None or error < best.error:
            best = Slope(value=value, error=error)
        size = max(abs(best.value), typical)
        agrees = max(best.error, abs(best.value - expected)) <= AGREEMENT_ERROR / 2 * size
        if best.error <= SUFFICIENT_ERROR * size or agrees:
            break
    if best is None:
        return Slope(value=math.nan, error=math.inf)
    return replace(best, flat=changes[min(changes)] == 0.0)


@final
@dataclass(frozen=True, slots=True)
class _Floor:
    """The error of a difference by rounding alone.

    Args:
        epsilon: Epsilon of the format.
        noise: Measured noise of the function's value.
    """

    epsilon: float
    noise: float

    def __call__(self, step: float, *values: float) -> float:
        return max(NOISE_ULPS * self.epsilon * max(map(abs, values)), self.noise) / step


def _agreed(
    function: Callable[[float], float], expected: float, typical: float, factor: float, floor_of: _Floor
) -> Slope | None:
    """Return the first central difference that agrees with an expected derivative, or None.

    Two numbers that agree to 5 digits need no third one to estimate their error: a mistake would not agree.
    """
    for step in (s * factor for s in FIRST_STEPS):
        high, low = function(step), function(-step)
        if not (math.isfinite(high) and math.isfinite(low)):
            return None
        value = (high - low) / (2 * step)
        error = max(abs(value - expected), floor_of(step, high, low))
        size = max(abs(value), typical)
        if error <= AGREEMENT_ERROR / 2 * size:
            return Slope(value=value, error=error)
        if floor_of(step, high, low) > AGREEMENT_ERROR / 2 * size:  # the format is too coarse for such short steps
            return None
    return None


def unit_of(value: float, typical: float) -> float:
    """Return the multiple of a direction within which a function changes by no more than its own size.

    The directions of a large network are steep: within a fixed step, its loss would be far from linear.

    Args:
        value: Value of the function.
        typical: Magnitude of its derivative.
    """
    return min(1.0, abs(value) / typical) if value and typical and math.isfinite(value + typical) else 1.0


def kink(function: Callable[[float], float], *, at: float, typical: float, epsilon: float, unit: float = 1.0) -> bool:
    """Return whether the one-sided slopes at 0 disagree however short the step is.

    Args:
        function: Function of the multiple of a direction.
        at: Value of the function at 0.
        typical: Magnitude of a slope that counts.
        epsilon: Epsilon of the format that the function is computed in.
        unit: Multiple of the direction that the steps are parts of.
    """
    gaps = list(_gaps(function, at, epsilon, unit))
    significant = [gap for gap, floor in gaps if gap > max(KINK_FRAC * typical, 4 * floor)]
    return len(significant) == len(gaps) and gaps[1][0] > STALLED_RATIO * gaps[0][0]


def _gaps(function: Callable[[float], float], at: float, epsilon: float, unit: float) -> Iterator[tuple[float, float]]:
    """Yield the disagreement of the one-sided slopes, and its rounding error, for shorter and shorter steps."""
    factor = unit * (epsilon / sys.float_info.epsilon) ** (1 / 3)
    for step in (s * factor for s in KINK_STEPS):
        high, low = function(step), function(-step)
        yield abs(high - 2 * at + low) / step, NOISE_ULPS * epsilon * max(abs(high), abs(low), abs(at)) / step
