"""Series as text: sparklines and the strip of layers. Height carries the meaning, colour only repeats it."""

# T = recorded steps, M = layers, W = columns of text

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

Floats = NDArray[np.floating[Any]]

LEVELS = 8
FLAT = 0.05
"""Relative range (of the logarithm to base 10: absolute) below which a trend is drawn flat: noise is no trend."""

# mid-luminance colours of the 256-colour cube, cold to warm: at least 3:1 on black and on white (WCAG 2.1, 1.4.11)
HEAT = ("#5f5fd7", "#5f5fd7", "#0087af", "#00877f", "#008700", "#5f8700", "#af7700", "#d75f00")


@final
@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs that a terminal can show.

    Args:
        bars: One per level, low to high.
        zero: A value that is exactly zero, or below all levels.
        broken: NaN or Inf.
        absent: No value at all.
        full, half, empty: Parts of a progress bar.
        onset: Marks the step of a finding under a trend.
        marks: Health by severity: info, warning, critical; `ok` for none.
        dot: Separates facts.
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


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "·", "\N{MULTIPLICATION SIGN}", " ", "━", "╸", "─", "▲", ("•", "▲", "✖"), "✔", "·")
ASCII = Glyphs(".:-=+*#@", "0", "x", " ", "=", "=", "-", "^", ("i", "!", "X"), "+", "|")


def glyphs(console: Console) -> Glyphs:
    """Return the signs that a console can show: plain ASCII where its encoding is not UTF."""
    return ASCII if console.options.ascii_only else UNICODE


def resample(values_T: Floats, width: int) -> Floats:
    """Return a series in at most `width` columns: the median of each equal part.

    A part that holds Inf is Inf, one without any value is nan.
    """
    if len(values_T) <= width:
        return values_T
    edges_W = np.linspace(0, len(values_T), width + 1).astype(int)
    return np.array([_median(values_T[a:b]) for a, b in pairwise(edges_W)])


def sparkline(values_T: Floats, *, width: int, signs: Glyphs, log: bool = False) -> str:
    """Draw a series as one line of bars, oldest left, from its least to its greatest value.

    Args:
        values_T: Series; nan is missing, Inf is drawn as broken.
        width: Most columns to take.
        signs: What the terminal can show.
        log: Draw powers of ten; zeros get a sign of their own.
    """
    values_W = np.asarray(resample(values_T, width), np.float64)
    with np.errstate(all="ignore"):
        drawn_W = np.where(values_W > 0, np.log10(values_W), np.where(values_W == 0, -np.inf, np.nan))
    drawn_W = drawn_W if log else values_W
    finite_W = drawn_W[np.isfinite(drawn_W)]
    low, high = (float(finite_W.min()), float(finite_W.max())) if finite_W.size else (0.0, 0.0)
    if high - low <= (FLAT if log else FLAT * max(abs(low), abs(high))):
        low, high = low - 0.5, low + 0.5 + 1e-9  # a flat line, in the middle
    return "".join(_bar(float(x), low, high, signs) for x in drawn_W)


def strip(norms_M: Floats, *, width: int, signs: Glyphs) -> tuple[Text, float]:
    """Draw one bar per layer, input side left: each level down is ten times less than the largest.

    Where there are more layers than columns, a column shows the smallest of its neighbours: a dead layer stays seen.

    Args:
        norms_M: Gradient norms; nan is no gradient, Inf is NaN or Inf in it.
        width: Most columns to take.
        signs: What the terminal can show.

    Returns:
        The strip, and the norm at its top, or nan where nothing is finite.
    """
    norms_W = _worst(norms_M, width)
    finite_W = norms_W[np.isfinite(norms_W) & (norms_W > 0)]
    top = float(finite_W.max()) if finite_W.size else float("nan")
    text = Text()
    for norm in norms_W:
        _append_cell(text, float(norm), top, signs)
    return text, top


def _append_cell(text: Text, norm: float, top: float, signs: Glyphs) -> None:
    if np.isnan(norm):
        text.append("_", "dim")
    elif np.isinf(norm):
        text.append(signs.broken, "bold #d70000")
    elif norm <= 0 or (level := LEVELS - 1 - int(np.log10(top / norm))) < 0:
        text.append(signs.zero, "#d70000")
    else:
        text.append(signs.bars[level], HEAT[level])


def _worst(norms_M: Floats, width: int) -> Floats:
    """Return one value per column: Inf before a small norm before a large one; nan only where all are."""
    if len(norms_M) <= width:
        return norms_M
    edges_W = np.linspace(0, len(norms_M), width + 1).astype(int)
    parts = [norms_M[a:b] for a, b in pairwise(edges_W)]
    return np.array([np.inf if np.isinf(p).any() else np.fmin.reduce(p) for p in parts])


def _median(part_T: Floats) -> float:
    if np.isinf(part_T).any():
        return float("inf")
    known_T = part_T[~np.isnan(part_T)]
    return float(np.median(known_T)) if known_T.size else float("nan")


def _bar(value: float, low: float, high: float, signs: Glyphs) -> str:
    if np.isnan(value):
        return signs.absent
    if value == np.inf:
        return signs.broken
    if value == -np.inf:
        return signs.zero
    return signs.bars[min(LEVELS - 1, int(LEVELS * (value - low) / (high - low)))]
