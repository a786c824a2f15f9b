"""The trend of a finding as a small picture in the page, with its step marked: readable without any script."""

# T = known steps, W = points of the line

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.records import Finding
from gradwatch.render.common.series import Series

Floats = NDArray[np.floating[Any]]

WIDTH, HEIGHT, MARGIN = 480, 72, 6
POINTS = 240
LEAST_DECADES = 1.0
LEAST_RANGE = 0.25
"""Least range, as in the terminal's trends: in powers of ten, or as a part of the greatest size."""


def trend(finding: Finding, series: Series) -> str:
    """Return a series as an SVG figure: a line of medians, and bars from the least to the greatest value near it.

    Args:
        finding: Its step is marked.
        series: What it is about; Inf where it was NaN or Inf.
    """
    first, last = int(series.steps_T[0]), int(series.steps_T[-1])
    x_T = MARGIN + (series.steps_T - first) / max(last - first, 1) * (WIDTH - 2 * MARGIN)
    y_T = _heights(series)
    x_W, low_W, mid_W, high_W = _thinned(x_T, y_T)
    onset = float(np.interp(finding.step, series.steps_T, x_T))
    told = f"{series.statistic}, {series.ends()}{', log scale' if series.is_log else ''}"
    about = f"{told}, steps {first:,} to {last:,}; found at step {finding.step:,}"
    return (
        f'<figure class="trend"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}" '
        f'preserveAspectRatio="none"><path class="onset" d="M{onset:.1f} 0V{HEIGHT}"/>'
        f'<path class="band" d="{_band(x_W, low_W, high_W)}"/>'
        f'<path class="line" d="{_line(x_W, mid_W)}"/><path class="broken" d="{_ticks(x_T, y_T)}"/></svg>'
        f"<figcaption><b>{escape(series.statistic)}</b> {escape(told.partition(', ')[2])}, "
        f'steps {first:,} to {last:,}<span class="onset-label"> | found at step {finding.step:,}</span>'
        f"</figcaption></figure>"
    )


def _heights(series: Series) -> Floats:
    """Return where each value lies in the picture, downwards; nan where it was not finite, the floor for zeros."""
    with np.errstate(all="ignore"):
        level_T = np.log10(series.values_T) if series.is_log else np.asarray(series.values_T, np.float64)
    finite_T = level_T[np.isfinite(level_T)]
    low, high = (float(finite_T.min()), float(finite_T.max())) if finite_T.size else (0.0, 0.0)
    least = LEAST_DECADES if series.is_log else LEAST_RANGE * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    level_T = np.where(level_T == -np.inf, low, level_T)
    share_T = np.where(np.isfinite(level_T), (level_T - low) / (high - low), np.nan)
    drawn_T: Floats = HEIGHT - MARGIN - share_T * (HEIGHT - 2 * MARGIN)
    return drawn_T


def _thinned(x_T: Floats, y_T: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return at most `POINTS` points: where each lies, and the lowest, middle and highest place of the line there."""
    size = -(-len(y_T) // POINTS)
    padded = np.pad(y_T, (0, -len(y_T) % size), constant_values=np.nan).reshape(-1, size)
    down_WN = np.sort(padded, axis=1)  # nan comes last
    known_W = np.count_nonzero(~np.isnan(down_WN), axis=1)
    rows, last_W = np.arange(len(down_WN)), np.maximum(known_W - 1, 0)
    x_W = x_T[np.minimum(rows * size + size // 2, len(x_T) - 1)]
    return x_W, down_WN[rows, last_W], down_WN[rows, last_W // 2], down_WN[:, 0]


def _line(x_W: Floats, y_W: Floats) -> str:
    """Return the path through the points that are known, with gaps where they are not."""
    pens = np.where(np.isnan(np.roll(y_W, 1)) | (np.arange(len(y_W)) == 0), "M", "L")
    return "".join(f"{pen}{x:.1f} {y:.1f}" for pen, x, y in zip(pens, x_W, y_W, strict=True) if not np.isnan(y))


def _band(x_W: Floats, low_W: Floats, high_W: Floats) -> str:
    """Return the path about all between two lines, as a bar for each point."""
    bars = zip(x_W, low_W, high_W, strict=True)
    return "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high in bars if low - high >= 0.1)


def _ticks(x_T: Floats, y_T: Floats) -> str:
    """Return a tick at the floor for each place at which the series was NaN or Inf."""
    places = dict.fromkeys(f"{x:.0f}" for x in x_T[np.isnan(y_T)])
    return "".join(f"M{place} {HEIGHT}v-10" for place in places)
