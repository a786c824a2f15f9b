"""Draw maps: bars and coarse overlays of text, and pictures of pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MOST_BARS = 10
WIDTH = 24
RAISES, LOWERS = " .oO@", " -=x#"
"""Signs of a part of an image by its magnitude, from none to the largest."""
MOST_ROWS, MOST_COLUMNS = 16, 32
SMALLEST_PICTURE = 192
GAP, PALE = 12, 96.0
"""Transparent columns between an image and its map, and the gray of its black parts below the map."""
RED, BLUE = (214.0, 39.0, 40.0), (31.0, 119.0, 180.0)

Pixels = NDArray[np.float64]


def bars(totals: Sequence[float], *, names: Sequence[str]) -> list[str]:
    """Return the features with the largest values as bars, in the order of their magnitudes."""
    order = sorted(range(len(totals)), key=lambda i: -abs(totals[i]))[:MOST_BARS]
    largest = max((abs(totals[i]) for i in order), default=0.0)
    labels = [names[i] for i in order]
    width = max((len(label) for label in labels), default=0)
    lines = []
    for i, label in zip(order, labels, strict=True):
        length = round(WIDTH * abs(totals[i]) / largest) if largest else 0
        lines.append(f"  {label:<{width}}  {totals[i]:+11.4g}  {('+' if totals[i] >= 0 else '-') * length}".rstrip())
    rest = len(totals) - len(order)
    return lines + ([f"  ... and {rest} smaller"] if rest else [])


def overlay(totals: Sequence[float], shape: Sequence[int], *, is_signed: bool) -> list[str]:
    """Return an image's map as rows of signs, two for each part so that parts look square."""
    height, width = shape
    pixels = np.asarray(totals, np.float64).reshape(height, width)
    rows, columns = min(height, MOST_ROWS), min(width, MOST_COLUMNS)
    coarse = np.add.reduceat(pixels, np.arange(rows) * height // rows, axis=0)
    coarse = np.add.reduceat(coarse, np.arange(columns) * width // columns, axis=1)
    largest = float(np.abs(coarse).max())
    levels = np.rint(np.abs(coarse) / largest * (len(RAISES) - 1)).astype(int) if largest else coarse.astype(int)
    lines = [
        "  |" + "".join((LOWERS if value < 0 else RAISES)[level] * 2 for value, level in zip(*row, strict=True)) + "|"
        for row in zip(coarse.tolist(), levels.tolist(), strict=True)
    ]
    legend = f"  {RAISES.strip()} raises the score" + (
        f", {LOWERS.strip()} lowers it" if is_signed else " or lowers it"
    )
    return [*lines, legend]


def picture(totals: Sequence[float], image: Pixels, *, is_signed: bool) -> tuple[bytes, tuple[int, int]]:
    """Draw a gray image, and next to it the map over the image: red raises the score, blue lowers it.

    Args:
        totals: The map, one value per pixel.
        image: The image, shape (channels, height, width).
        is_signed: Whether negative values lower the score.

    Returns:
        The picture as PNG, and its width and height.
    """
    gray = image.mean(0)
    low, high = float(gray.min()), float(gray.max())
    gray = (gray - low) / ((high - low) or 1.0) * 255.0
    values = np.asarray(totals, np.float64).reshape(gray.shape)
    # the 99th percentile: one extreme pixel would leave the rest without color
    largest = float(np.quantile(np.abs(values), 0.99)) or float(np.abs(values).max()) or 1.0
    strength = np.minimum(np.abs(values) / largest, 1.0)[..., None] * 0.8
    color = np.where((values < 0)[..., None] & is_signed, BLUE, RED)
    plain = np.repeat(gray[..., None], 3, axis=-1)
    # paler than the image, so that colors show on its black parts too
    blended = (PALE + (1.0 - PALE / 255.0) * plain) * (1.0 - strength) + color * strength
    scale = max(1, -(-SMALLEST_PICTURE // max(gray.shape)))
    parts = [np.rint(part).astype(np.uint8).repeat(scale, 0).repeat(scale, 1) for part in (plain, blended)]
    height, width = parts[0].shape[:2]
    drawn = Image.new("RGBA", (2 * width + GAP, height))
    for part, left in zip(parts, (0, width + GAP), strict=True):
        drawn.paste(Image.fromarray(part), (left, 0))
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return file.getvalue(), drawn.size
