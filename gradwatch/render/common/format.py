"""Format numbers for people: significant digits, percent, durations, names. All percentages are formatted here."""

from __future__ import annotations

import math

from gradwatch import catalogue
from gradwatch.records import Quantity

MISSING = "-"
FRACTION = "0..1"
GIB = float(1 << 30)
_UNITS = {s.name: s.unit for s in (*catalogue.PARAM, *catalogue.ACT, *catalogue.RUN)}


def number(measured: float, *, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, or `-` for nan."""
    if math.isnan(measured):
        return MISSING
    if math.isinf(measured):
        return "Inf" if measured > 0 else "-Inf"
    if measured == 0:  # log10 below needs a number other than 0
        return "0"
    if 1e-3 <= abs(measured) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(measured))))
        return f"{measured:,.{decimals}f}"
    # `1e-5`, where Python writes `1e-05`
    mantissa, exponent = f"{measured:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def value(measured: float) -> str:
    """Return a number that every step has. Such a number is never missing, so nan is shown as `NaN`."""
    return "NaN" if math.isnan(measured) else number(measured)


def percent(fraction: float) -> str:
    """Return a fraction as percent. Only exactly 0 and 1 are shown as 0 % and 100 %."""
    if math.isnan(fraction):
        return MISSING
    points = 100.0 * fraction
    # rounding would claim exactly 0 or 1
    if 0 < points < 0.1:
        return "<0.1 %"
    if 99.9 < points < 100:
        return ">99.9 %"
    return f"{points:.0f} %" if points == round(points) else f"{points:.1f} %"


def duration(seconds: float) -> str:
    """Return a time span, such as `64 ms`, `41 s`, `3 min 12 s` or `2 h 5 min`."""
    if not math.isfinite(seconds):
        return MISSING
    # limits are where the longer form would round up: 0.095 s is 0.1 s, 9.95 s is 10 s
    if 0 < seconds < 0.095:
        return f"{1e3 * seconds:.0f} ms" if seconds >= 9.95e-4 else "<1 ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def shown_size(nbytes: float) -> str:
    """Return a number of bytes with three digits, such as `1.23 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= 0.9995 * factor:
            return f"{nbytes / factor:.3g} {unit}" if abs(nbytes) < 999.5 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes:,.0f} B"


def quantity(evidence: Quantity) -> str:
    """Return a number of a finding's evidence with its unit, fractions as percent."""
    if math.isnan(evidence.value):  # evidence is never missing, so nan was measured
        return "NaN"
    unit = evidence.unit or _UNITS.get(evidence.name, "")
    if unit == FRACTION:
        return percent(evidence.value)
    shown = f"{evidence.value:,.0f}" if _is_count(evidence.value) else number(evidence.value)
    return f"{shown} {unit}".rstrip()


def times(ratio: float) -> str:
    """Return a factor with 2 significant digits, such as `31,000x`."""
    return f"{float(f'{ratio:.2g}'):,.0f}x" if 10 <= ratio < 1e6 else f"{number(ratio, digits=2)}x"


def plural(count: int, noun: str) -> str:
    """Return a count and its noun, such as `1 finding` or `12 findings`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shorten(name: str, width: int) -> str:
    """Return a dotted name, cut at the start to fit a width. The end stays, since it distinguishes layers."""
    return name if len(name) <= width else "~" + name[len(name) - width + 1 :]


def _is_count(value: float) -> bool:
    return math.isfinite(value) and value == round(value) and abs(value) < 1e9
