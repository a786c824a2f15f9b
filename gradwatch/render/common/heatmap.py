"""Draw the gradient norm of every layer over the run as a PNG with axes, names and a scale.

Drawn with pillow: matplotlib, which would draw the axes, is an optional dependency.
"""

# T = recorded steps, M = layers, W = columns of the plot in pixels

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gradwatch.records import Finding
from gradwatch.render.common.format import shorten
from gradwatch.render.common.layers import Layer, worst_finding

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

WIDTH, HEIGHT, FONT = 460, 280, 23
"""Size of the plot and of letters, in pixels: TensorBoard shrinks a picture to 340 to 480 across by 210 down."""
TOP, RIGHT = 2 * FONT, 112
"""Room above the plot for its title, and beside it for the scale."""
LABEL = 16
"""Letters of a layer's name that fit."""
MIN_DECADES, MAX_DECADES = 2, 24
BOX = 16
INK, PAPER = (40, 40, 40), (255, 255, 255)
NONE, ZERO, BROKEN = (224, 224, 224), (0, 0, 0), (220, 0, 0)
# five colours of viridis (matplotlib, CC0): even steps to the eye, in grey, and for the colour-blind
SCALE = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)


def draw(
    steps_T: NDArray[np.int64],
    norms_TM: Floats,
    of: Sequence[Layer],
    *,
    findings: Iterable[Finding] = (),
    title: str = "gradient norm",
    absent: str = "no gradient",
) -> tuple[bytes, tuple[int, int]]:
    """Draw the gradient norms of layers, or what is like them, over steps, the input side on top.

    Args:
        steps_T: Recorded steps, not empty.
        norms_TM: Norms; nan is no gradient, Inf is NaN or Inf in it.
        of: The layers.
        findings: Marked at their step and layer with a triangle.
        title: What the colours are.
        absent: What nan is.

    Returns:
        The PNG, and its width and height.
    """
    norms_WM = _by_column(steps_T, norms_TM)
    low, high = limits(norms_WM)
    row_of_y = np.arange(HEIGHT) * len(of) // HEIGHT
    picture = Image.fromarray(_colours(norms_WM.T[row_of_y], low, high))
    font = ImageFont.load_default(FONT)
    left, top = _left(of, font), TOP
    size = (left + WIDTH + RIGHT, top + HEIGHT + 3 * FONT + 8)
    canvas = Image.new("RGB", size, PAPER)
    canvas.paste(picture, (left, top))
    pen = ImageDraw.Draw(canvas)
    _write(pen, (left, 4), f"{title}; input side on top", font)
    _names(pen, font, of, left, top)
    _steps(pen, font, steps_T, left, top + HEIGHT)
    _scale(canvas, pen, font, (low, high), (left + WIDTH + 14, top))
    _legend(pen, font, norms_WM, left, top + HEIGHT + 2 * FONT, absent=absent)
    for m, layer in enumerate(of):
        finding = worst_finding(layer, findings)
        if finding is not None:
            _mark(pen, _x(finding.step, steps_T, left), top + HEIGHT * (2 * m + 1) // (2 * len(of)))
    file = io.BytesIO()
    canvas.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(file, "PNG", compress_level=3)
    return file.getvalue(), size


def limits(norms: Floats) -> tuple[int, int]:
    """Return the whole powers of ten that a scale spans: all finite norms, at least 2 and at most 24 of them."""
    usable = norms[np.isfinite(norms) & (norms > 0)]
    if not usable.size:
        return -1, 1
    high = int(np.ceil(np.log10(usable.max())))
    low = int(np.floor(np.log10(usable.min())))
    return max(min(low, high - MIN_DECADES), high - MAX_DECADES), high


def _by_column(steps_T: NDArray[np.int64], norms_TM: Floats) -> Floats:
    """Return what each column of the plot shows, of shape (W, M): the largest norm of its steps, so none is hidden.

    A column without a recorded step shows the one before it.
    """
    place_W = np.linspace(steps_T[0], steps_T[-1], WIDTH)
    first_W = np.clip(np.searchsorted(steps_T, place_W, side="right") - 1, 0, None)
    norms_WM: Floats = np.fmax.reduceat(norms_TM, first_W, axis=0)
    return norms_WM


def _colours(norms_YW: Floats, low: int, high: int) -> Bytes:
    """Return the colours of norms, of shape (Y, W, 3)."""
    with np.errstate(all="ignore"):
        place = np.clip((np.log10(norms_YW) - low) / (high - low), 0, 1)
    finite = np.isfinite(norms_YW) & (norms_YW > 0)
    colours = _colour(np.where(finite, place, 0.0))
    colours[np.isnan(norms_YW)] = NONE
    colours[norms_YW == 0] = ZERO
    colours[np.isinf(norms_YW)] = BROKEN
    y_Y1, w_W = np.arange(len(norms_YW))[:, None], np.arange(norms_YW.shape[1])
    colours[np.isinf(norms_YW) & ((y_Y1 + w_W) // 4 % 2 == 0)] = PAPER  # hatched: not told by colour alone
    return colours


def _colour(place: Floats) -> Bytes:
    """Return the colour of a place on the scale, from 0 to 1."""
    table = np.stack([np.interp(np.linspace(0, 4, 256), np.arange(5), SCALE[:, i]) for i in range(3)], axis=1)
    colours: Bytes = table.astype(np.uint8)[(place * 255).astype(np.uint8)]
    return colours


def _left(of: Sequence[Layer], font: Any) -> int:
    longest = max((shorten(layer.name, LABEL) for layer in of), key=len)
    return int(font.getlength(longest)) + 22


def _write(pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, font: Any, *, anchor: str = "la") -> None:
    """Write in strokes of 3 pixels or more: TensorBoard shrinks a picture to less than half by leaving pixels out."""
    pen.text(at, text, INK, font, anchor=anchor, stroke_width=1, stroke_fill=INK)


def _names(pen: ImageDraw.ImageDraw, font: Any, of: Sequence[Layer], left: int, top: int) -> None:
    """Write the names of the layers, or of every few where there are many."""
    every = -(-len(of) * (FONT + 3) // HEIGHT)
    for m in range(0, len(of), every):
        y = top + HEIGHT * (2 * m + 1) // (2 * len(of))
        _write(pen, (left - 8, y), shorten(of[m].name, LABEL), font, anchor="rm")
        pen.line([(left - 5, y), (left - 1, y)], INK)


def _steps(pen: ImageDraw.ImageDraw, font: Any, steps_T: NDArray[np.int64], left: int, bottom: int) -> None:
    for step in ticks(int(steps_T[0]), int(steps_T[-1])):
        x = _x(step, steps_T, left)
        pen.line([(x, bottom), (x, bottom + 4)], INK)
        _write(pen, (x, bottom + 6), f"{step:,}", font, anchor="mt")
    _write(pen, (left - 14, bottom + 6), "step", font, anchor="rt")


def ticks(first: int, last: int) -> list[int]:
    """Return up to six round steps in a range: multiples of 1, 2 or 5 times a power of ten."""
    span = max(1, last - first)
    unit = 10 ** int(np.log10(span))
    every = next(e for e in (unit // 10, unit // 5, unit // 2, unit, 2 * unit) if e and span / e <= 5)
    return [step for step in range(first - first % every, last + 1, every) if step >= first]


def _x(step: int, steps_T: NDArray[np.int64], left: int) -> int:
    span = max(1, int(steps_T[-1] - steps_T[0]))
    return left + int(np.clip((WIDTH - 1) * (step - int(steps_T[0])) / span, 0, WIDTH - 1))


def _scale(
    canvas: Image.Image, pen: ImageDraw.ImageDraw, font: Any, bounds: tuple[int, int], at: tuple[int, int]
) -> None:
    """Draw the colour bar with its powers of ten."""
    low, high = bounds
    bar = np.repeat(_colour(np.linspace(1, 0, HEIGHT))[:, None], 14, axis=1)
    canvas.paste(Image.fromarray(bar), at)
    for power in range(low, high + 1, -(-(high - low) // 7)):
        y = at[1] + round((HEIGHT - 1) * (high - power) / (high - low))
        pen.line([(at[0] + 14, y), (at[0] + 18, y)], INK)
        _write(pen, (at[0] + 21, y), f"1e{power}", font, anchor="lm")


def _legend(pen: ImageDraw.ImageDraw, font: Any, norms: Floats, left: int, y: int, *, absent: str) -> None:
    """Explain what is drawn beside the scale, where it occurs."""
    x = left
    odd = ((np.isinf(norms), BROKEN, "NaN or Inf"), (norms == 0, ZERO, "zero"), (np.isnan(norms), NONE, absent))
    for occurs, colour, word in odd:
        if occurs.any():
            pen.rectangle([(x, y), (x + BOX, y + BOX)], colour, INK)
            if colour == BROKEN:
                pen.line([(x, y + BOX), (x + BOX, y)], PAPER, 4)
            _write(pen, (x + BOX + 6, y + BOX // 2), word, font, anchor="lm")
            x += BOX + 24 + int(font.getlength(word))


def _mark(pen: ImageDraw.ImageDraw, x: int, y: int) -> None:
    pen.polygon([(x - 8, y - 8), (x + 7, y), (x - 8, y + 8)], PAPER, INK)
