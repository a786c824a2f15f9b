"""Draw the gradient norm of every layer over the run as a PNG with axes, names and a scale.

The PNG is drawn with pillow, since matplotlib is an optional dependency.
"""

# T = recorded steps, M = layers, W = columns of the plot in pixels

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from gradwatch.records import Finding, Severity
from gradwatch.render.common.format import shorten
from gradwatch.render.common.layers import Layer, worst_finding

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

SIZE = (350, 215)
"""Size of a picture before it is enlarged, in pixels. TensorBoard shows pictures 350 px wide in its tab IMAGES, and
within 367 x 215 px in TIME SERIES. It shrinks a larger picture by leaving pixels out."""
ENLARGED = 2
"""Each pixel becomes a square of this side, so that the picture is not blurred on a screen with twice the pixels. Where
TensorBoard shrinks it to `SIZE`, every pixel is exactly one pixel of the drawing, and its text is crisp."""
FONT = 11
TOP, BOTTOM, RIGHT = 2 * FONT + 4, 3 * FONT + 6, 48
"""Margins of the plot in pixels: for its title, for steps and legend, and for the scale."""
HEIGHT = SIZE[1] - TOP - BOTTOM
LABEL = 20
"""Maximum number of characters of a layer's name."""
MIN_DECADES, MAX_DECADES = 2, 24
BOX = 8  # side of a square in the legend, in pixels
INK, PAPER = (40, 40, 40), (255, 255, 255)
NONE, ZERO, BROKEN = (224, 224, 224), (0, 0, 0), (220, 0, 0)
# 5 colors of viridis (matplotlib, CC0): perceptually uniform, also in gray and for the color-blind
SCALE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colors from small to large values, in TensorBoard's pictures and in the map of the report."""


def draw(
    steps_T: NDArray[np.int64],
    norms_TM: Floats,
    of: Sequence[Layer],
    *,
    findings: Iterable[Finding] = (),
    title: str = "gradient norm",
    absent: str = "no gradient",
) -> tuple[bytes, tuple[int, int]]:
    """Draw the gradient norms of layers, or similar values, over steps, with the input side on top.

    Args:
        steps_T: Recorded steps, not empty.
        norms_TM: Norms; nan is no gradient, Inf is a gradient with NaN or Inf.
        of: The layers.
        findings: Findings to mark with a triangle at their onset and layer, or above the plot if no layer is theirs.
        title: Meaning of the colors.
        absent: Meaning of nan.

    Returns:
        The PNG, and its width and height.
    """
    font = ImageFont.load_default(FONT)
    left, top = _left(of, font), TOP
    width = SIZE[0] - left - RIGHT
    norms_WM = _by_column(steps_T, norms_TM, width)
    low, high = limits(norms_WM)
    row_of_y = np.arange(HEIGHT) * len(of) // HEIGHT  # with more layers than pixels, some are left out
    picture = Image.fromarray(_colors(norms_WM.T[row_of_y], low, high))
    canvas = Image.new("RGB", SIZE, PAPER)
    canvas.paste(picture, (left, top))
    pen = ImageDraw.Draw(canvas)
    _write(pen, (left, 3), f"{title}; input side on top", font)
    _names(pen, font, of, left, top)
    _steps(pen, font, steps_T, left, top + HEIGHT, width)
    _scale(canvas, pen, font, (low, high), (left + width + 6, top))
    _legend(pen, font, norms_WM, left, absent=absent)
    findings = tuple(findings)
    names = frozenset[str]().union(*(layer.names for layer in of))
    for elsewhere in (f for f in findings if names.isdisjoint(f.names) and f.severity > Severity.INFO):
        _mark_above(pen, _x(elsewhere.since, steps_T, left, width), top)
    for m, layer in enumerate(of):
        finding = worst_finding(layer, findings)
        if finding is not None:
            _mark(pen, _x(finding.since, steps_T, left, width), top + HEIGHT * (2 * m + 1) // (2 * len(of)))
    size = (SIZE[0] * ENLARGED, SIZE[1] * ENLARGED)
    canvas = canvas.resize(size, Image.Resampling.NEAREST)
    file = io.BytesIO()
    # a palette of 128 colors makes a smaller file than RGB
    canvas.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, "PNG", compress_level=3)
    return file.getvalue(), size


def limits(norms: Floats) -> tuple[int, int]:
    """Return the lowest and highest power of ten of the scale.

    The scale covers all finite norms, but spans at least 2 and at most 24 powers of ten.
    """
    usable = norms[np.isfinite(norms) & (norms > 0)]
    if not usable.size:  # any scale will do: no pixel uses it
        return -1, 1
    high = int(np.ceil(np.log10(usable.max())))
    low = int(np.floor(np.log10(usable.min())))
    # one vanished gradient, such as 1e-40, must not squeeze all others into one color
    return max(min(low, high - MIN_DECADES), high - MAX_DECADES), high


def _by_column(steps_T: NDArray[np.int64], norms_TM: Floats, width: int) -> Floats:
    """Return the largest norm in each column of the plot, of shape (W, M), so that no spike is hidden.

    A column without a recorded step shows the step before it.
    """
    place_W = np.linspace(steps_T[0], steps_T[-1], width)
    first_W = np.clip(np.searchsorted(steps_T, place_W, side="right") - 1, 0, None)
    # fmax: nan, a step without a gradient, hides no norm
    norms_WM: Floats = np.fmax.reduceat(norms_TM, first_W, axis=0)
    return norms_WM


def _colors(norms_YW: Floats, low: int, high: int) -> Bytes:
    """Return the colors of norms, of shape (Y, W, 3)."""
    # log10 of 0 and nan warns; these pixels are overwritten below
    with np.errstate(all="ignore"):
        place = np.clip((np.log10(norms_YW) - low) / (high - low), 0, 1)
    finite = np.isfinite(norms_YW) & (norms_YW > 0)
    colors = _color(np.where(finite, place, 0.0))
    colors[np.isnan(norms_YW)] = NONE
    colors[norms_YW == 0] = ZERO
    colors[np.isinf(norms_YW)] = BROKEN
    y_Y1, w_W = np.arange(len(norms_YW))[:, None], np.arange(norms_YW.shape[1])
    colors[np.isinf(norms_YW) & ((y_Y1 + w_W) // 2 % 2 == 0)] = PAPER  # hatched: color alone is not enough
    return colors


def _color(place: Floats) -> Bytes:
    stops_53 = np.array([ImageColor.getrgb(color) for color in SCALE], np.float64)
    at, places = np.linspace(0, len(SCALE) - 1, 256), np.arange(len(SCALE))
    table = np.stack([np.interp(at, places, stops_53[:, i]) for i in range(3)], axis=1)
    colors: Bytes = table.astype(np.uint8)[(place * 255).astype(np.uint8)]
    return colors


def _left(of: Sequence[Layer], font: Any) -> int:
    # `step` stands below the names, and may be wider
    return int(max(font.getlength(word) for word in ("step", *(shorten(layer.name, LABEL) for layer in of)))) + 10


def _write(pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, font: Any, *, anchor: str = "la") -> None:
    pen.text(at, text, INK, font, anchor=anchor)


def _names(pen: ImageDraw.ImageDraw, font: Any, of: Sequence[Layer], left: int, top: int) -> None:
    # the number of layers per name, rounded up: names need FONT + 2 px each
    every = -(-len(of) * (FONT + 2) // HEIGHT)
    for m in range(0, len(of), every):
        y = top + HEIGHT * (2 * m + 1) // (2 * len(of))
        _write(pen, (left - 5, y), shorten(of[m].name, LABEL), font, anchor="rm")
        pen.line([(left - 3, y), (left - 1, y)], INK)


def _steps(pen: ImageDraw.ImageDraw, font: Any, steps_T: NDArray[np.int64], left: int, bottom: int, width: int) -> None:
    for step in ticks(int(steps_T[0]), int(steps_T[-1])):
        x = _x(step, steps_T, left, width)
        pen.line([(x, bottom), (x, bottom + 2)], INK)
        _write(pen, (x, bottom + 4), f"{step:,}", font, anchor="mt")
    _write(pen, (left - 8, bottom + 4), "step", font, anchor="rt")


def ticks(first: int, last: int) -> list[int]:
    """Return up to 6 round steps in a range: multiples of 1, 2 or 5 times a power of ten."""
    span = max(1, last - first)
    unit = 10 ** int(np.log10(span))
    # a span below 10 has a unit of 1, whose parts are 0
    every = next(e for e in (unit // 10, unit // 5, unit // 2, unit, 2 * unit) if e and span / e <= 5)
    return [step for step in range(first - first % every, last + 1, every) if step >= first]


def _x(step: int, steps_T: NDArray[np.int64], left: int, width: int) -> int:
    span = max(1, int(steps_T[-1] - steps_T[0]))  # a run of one step has no span
    # a finding may be at a step that is not kept, before the first or after the last
    return left + int(np.clip((width - 1) * (step - int(steps_T[0])) / span, 0, width - 1))


def _scale(
    canvas: Image.Image, pen: ImageDraw.ImageDraw, font: Any, bounds: tuple[int, int], at: tuple[int, int]
) -> None:
    """Draw the color bar with its powers of ten."""
    low, high = bounds
    # from 1 to 0: the y axis of a picture points down
    bar = np.repeat(_color(np.linspace(1, 0, HEIGHT))[:, None], 7, axis=1)
    canvas.paste(Image.fromarray(bar), at)
    for power in range(low, high + 1, -(-(high - low) // 7)):  # at most 8 labels
        y = at[1] + round((HEIGHT - 1) * (high - power) / (high - low))
        pen.line([(at[0] + 7, y), (at[0] + 9, y)], INK)
        _write(pen, (at[0] + 11, y), f"1e{power}", font, anchor="lm")


def _legend(pen: ImageDraw.ImageDraw, font: Any, norms: Floats, left: int, *, absent: str) -> None:
    """Explain the colors that are not on the scale, if they occur in the plot."""
    x, y = left, SIZE[1] - FONT - 5
    odd = ((np.isinf(norms), BROKEN, "NaN or Inf"), (norms == 0, ZERO, "zero"), (np.isnan(norms), NONE, absent))
    for occurs, color, word in odd:
        if occurs.any():
            pen.rectangle([(x, y), (x + BOX, y + BOX)], color, INK)
            if color == BROKEN:  # hatched, as in the plot
                pen.line([(x, y + BOX), (x + BOX, y)], PAPER, 2)
            _write(pen, (x + BOX + 4, y + BOX // 2), word, font, anchor="lm")
            x += BOX + 14 + int(font.getlength(word))


def _mark(pen: ImageDraw.ImageDraw, x: int, y: int) -> None:
    pen.polygon([(x - 4, y - 4), (x + 4, y), (x - 4, y + 4)], PAPER, INK)


def _mark_above(pen: ImageDraw.ImageDraw, x: int, top: int) -> None:
    pen.polygon([(x - 4, top - 7), (x + 4, top - 7), (x, top - 1)], INK)
