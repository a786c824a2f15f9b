"""Draw series as text: sparklines and the strip of layers. Height carries the meaning, and color only repeats it."""

# T = recorded steps, M = layers, W = columns of text

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Floats = NDArray[np.floating[Any]]

LEVELS = 8
RANGE = 0.25
"""Minimum range of a linear trend, as a fraction of its largest absolute value. It keeps noise nearly flat."""
DECADES = 1.0
"""Minimum range of a logarithmic trend, in powers of ten. It keeps noise nearly flat."""

# from the 256-color cube, at least 3:1 on black and on white (WCAG 2.1, 1.4.11): green fades over blue to violet,
# without a warning color, so that gradients of equal size look healthy at any level
HEAT = ("#875fd7", "#5f5fd7", "#5f87d7", "#0087af", "#008787", "#00875f", "#008700", "#5f8700")

BROKEN = "bright_red"
"""Color of NaN, of Inf and of zeros, a name that the theme of a terminal adapts to its background."""


@final
@dataclass(frozen=True, slots=True)
class Glyphs:
    """Signs that a terminal can show.

    Args:
        bars: One sign per level, low to high.
        zero: A value that is exactly 0, or below all levels.
        broken: NaN or Inf.
        absent: No gradient at all.
        full, half, empty: Parts of a progress bar.
        onset: Marks the step of a finding under a trend.
        marks: Signs of the severities: info, warning, critical.
        ok: Sign of a healthy run or layer.
        dot: Separator of facts.
    """

    bars: str
    zero: str
    broken: str
    absent: str
    full: str
    half: str
    empty: str
    onset: str
    marks: tuple[str, str, str]
    ok: str
    dot: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "·", "\N{MULTIPLICATION SIGN}", "-", "━", "╸", "─", "▲", ("•", "▲", "✖"), "✔", "·")
ASCII = Glyphs(".:-=+*#@", "0", "x", "_", "=", "=", "-", "^", ("i", "!", "X"), "+", "|")


def glyphs(console: Console) -> Glyphs:
    """Return the signs that a console can show: plain ASCII if its encoding is not UTF."""
    return ASCII if console.options.ascii_only else UNICODE


def column(index: int, length: int, width: int) -> int:
    """Return the column in which an entry of a series is drawn."""
    return index if length <= width else int(np.searchsorted(_edges(length, width), index, side="right")) - 1


def resample(values_T: Floats, width: int, *, keep: int | None = None) -> Floats:
    """Return a series in at most `width` columns: the mean of the finite values of each equal part.

    A part with Inf is Inf. A part without a finite value is -Inf if it has -Inf, else nan.

    Args:
        values_T: Series.
        width: Maximum number of columns.
        keep: Index of an entry that is not averaged, since a mean would hide a single spike.
    """
    if len(values_T) <= width:
        return values_T
    first_W = _edges(len(values_T), width)[:-1]
    finite_T = np.isfinite(values_T)
    count_W = np.add.reduceat(finite_T, first_W, dtype=np.int64)
    with np.errstate(invalid="ignore"):  # 0 / 0: a part without a finite value
        mean_W: Floats = np.add.reduceat(np.where(finite_T, values_T, 0.0), first_W) / count_W
    mean_W[(count_W == 0) & np.logical_or.reduceat(values_T == -np.inf, first_W)] = -np.inf
    # after -Inf: a broken value wins over a zero
    mean_W[np.logical_or.reduceat(values_T == np.inf, first_W)] = np.inf
    if keep is not None:
        mean_W[column(keep, len(values_T), width)] = values_T[keep]
    return mean_W


def sparkline(values_T: Floats, *, width: int, signs: Glyphs, log: bool = False, keep: int | None = None) -> str:
    """Draw a series as one line of bars, oldest on the left, scaled from its minimum to its maximum.

    Args:
        values_T: Series; nan is missing, Inf is drawn as broken.
        width: Maximum number of columns.
        signs: Glyphs that the terminal can show.
        log: Whether to use a log scale, with a separate sign for 0.
        keep: Index of an entry that is not averaged.
    """
    drawn_T = np.asarray(values_T, np.float64)
    if log:
        with np.errstate(all="ignore"):  # log10 of 0 is -Inf, which `_bar` draws as zero
            drawn_T = np.where(drawn_T >= 0, np.log10(drawn_T), np.nan)
    drawn_W = resample(drawn_T, width, keep=keep)
    finite_W = drawn_W[np.isfinite(drawn_W)]
    low, high = (float(finite_W.min()), float(finite_W.max())) if finite_W.size else (0.0, 0.0)
    least = DECADES if log else RANGE * max(abs(low), abs(high))
    if high - low < least or high == low:
        least = max(least, 1e-300)  # a series of zeros has no range, and `_bar` divides by it
        low = (low + high) / 2 - least * (LEVELS / 2 + 0.5) / LEVELS  # center the series on the middle of a level
        high = low + least
    return "".join(_bar(x, low, high, signs) for x in drawn_W.tolist())


def strip(norms_M: Floats, *, width: int, signs: Glyphs, cell: int = 1) -> tuple[Text, float]:
    """Draw one bar per layer, input side on the left. Each level down stands for a 10x smaller norm.

    If there are more layers than columns, a column shows its smallest norm, so that a dead layer stays visible.

    Args:
        norms_M: Gradient norms; nan is no gradient, Inf is a gradient with NaN or Inf.
        width: Maximum number of bars.
        signs: Glyphs that the terminal can show.
        cell: Columns per bar.

    Returns:
        The strip, and the norm of the top level, or nan if no norm is finite and above 0.
    """
    from rich.text import Text  # the import draws a random number, so the sinks of a user's own loop must not need it

    norms_W = _worst(norms_M, width)
    finite_W = norms_W[np.isfinite(norms_W) & (norms_W > 0)]
    top = float(finite_W.max()) if finite_W.size else float("nan")
    text = Text()
    for norm in norms_W:
        _append_cell(text, float(norm), top, signs, cell)
    return text, top


def _append_cell(text: Text, norm: float, top: float, signs: Glyphs, cell: int) -> None:
    if np.isnan(norm):
        text.append(signs.absent * cell, "dim")
    elif np.isinf(norm):
        text.append(signs.broken * cell, f"bold {BROKEN}")
    # a norm below the lowest level is drawn as zero; the order matters, since log10 needs a positive norm
    elif norm <= 0 or (level := LEVELS - 1 - int(np.log10(top / norm))) < 0:
        text.append(signs.zero * cell, BROKEN)
    else:
        text.append(signs.bars[level] * cell, HEAT[level])


def _worst(norms_M: Floats, width: int) -> Floats:
    """Return one value per column: Inf if it has one, else the smallest norm; nan only if all are nan."""
    if len(norms_M) <= width:
        return norms_M
    # fmin: nan, a layer without a gradient, hides no other layer
    parts = [norms_M[a:b] for a, b in pairwise(_edges(len(norms_M), width))]
    return np.array([np.inf if np.isinf(p).any() else np.fmin.reduce(p) for p in parts])


def _edges(length: int, width: int) -> NDArray[np.int64]:
    return np.linspace(0, length, width + 1).astype(np.int64)


def _bar(value: float, low: float, high: float, signs: Glyphs) -> str:
    if value - value == 0:  # finite: Inf - Inf and nan are nan
        return signs.bars[min(LEVELS - 1, int(LEVELS * (value - low) / (high - low)))]
    if value != value:  # nan: a gap
        return " "
    return signs.broken if value > 0 else signs.zero
