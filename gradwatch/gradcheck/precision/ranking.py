"""Rank the operations of a step by the digits that they lose, and find the one nearest to an overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gradwatch.gradcheck.precision.result import LEAST_LOST, LostDigits, Reach, located
from gradwatch.gradcheck.precision.tracer import Measured


def lost_digits(measured: Measured) -> float:
    """Return the decimal digits that an operation loses: right in its arguments, and wrong in its result."""
    rounding = torch.finfo(measured.dtype).eps / 2
    if measured.is_zero:
        return 0.0
    if measured.error == math.inf:
        return -math.log10(rounding)
    # an error of 1 leaves no digit, and a larger one loses no more
    after, before = (min(1.0, max(rounding, error)) for error in (measured.error, measured.given))
    return math.log10(after / before)


def ranked(measured: Iterable[Measured]) -> tuple[LostDigits, ...]:
    """Return the operations that lose digits, the most first, and one for all calls from one line of one module."""
    worst: dict[tuple[object, ...], LostDigits] = {}
    for one in measured:
        digits, operation = lost_digits(one), one.operation
        if digits < LEAST_LOST or (one.error == math.inf and one.given == math.inf):
            continue
        key = (operation.name, operation.phase, operation.module, operation.place)
        known = worst.get(key)
        calls = known.calls + 1 if known else 1
        given, error = one.given, one.error
        if known and known.digits >= digits:
            digits, given, error = known.digits, known.given, known.error
        worst[key] = LostDigits(
            operation=operation.name,
            phase=operation.phase,
            module=operation.module,
            place=operation.place,
            digits=digits,
            given=given,
            error=error,
            calls=calls,
        )
    # results that are not finite come first
    return tuple(sorted(worst.values(), key=lambda o: (o.error != math.inf, -o.digits)))


def nearest_overflow(measured: Iterable[Measured], dtype: torch.dtype) -> Reach | None:
    """Return the operation whose result is nearest to the largest number of a format."""
    found = [m for m in measured if m.dtype == dtype and m.grows and m.top > 0 and math.isfinite(m.top)]
    if not found:
        return None
    nearest = max(found, key=lambda m: m.top)
    place = located(nearest.operation.name, nearest.operation.module, nearest.operation.place)
    decades = math.log10(torch.finfo(dtype).max / nearest.top)
    return Reach(place=place, top=nearest.top, decades=decades, format=str(dtype).removeprefix("torch."))
