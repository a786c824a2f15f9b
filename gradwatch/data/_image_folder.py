"""Read a folder of pictures by class: leave out folders without pictures, and scale 16-bit pictures."""

# H, W = height and width of a picture

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS

from gradwatch.data._labels import listed
from gradwatch.errors import GradwatchError

MAX_16_BIT = 65535
WIDE_FORMATS = ("PNG", "PPM")
"""Formats whose pictures have at most 16 bits, also where Pillow opens them as 32-bit integers."""


@final
class PictureFolder(datasets.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """An ImageFolder that leaves out hidden files and folders without pictures, and does not clip 16-bit pictures.

    Args:
        root: Folder with one folder for each class.
        options: Other keyword arguments of `ImageFolder`.

    Attributes:
        left_out: Names of the folders that are not classes.
    """

    def __init__(self, root: str, **options: Any) -> None:
        self.left_out: list[str] = []
        super().__init__(root, **{"loader": read_picture, "is_valid_file": is_picture} | options)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders that hold pictures, in sorted order, and the number of each."""
        names, _ = super().find_classes(directory)
        kept = [name for name in names if not name.startswith(".") and _holds_picture(Path(directory) / name)]
        self.left_out = [name for name in names if name not in kept]
        if not kept:
            raise FileNotFoundError(f"no picture in the folders of {directory}: {listed(self.left_out)}")
        return kept, {name: number for number, name in enumerate(kept)}


def is_picture(path: str) -> bool:
    """Return whether a file has the extension of a picture and is not hidden."""
    # `._1.png` is what macOS puts next to a picture on other file systems
    return path.lower().endswith(IMG_EXTENSIONS) and not Path(path).name.startswith(".")


def read_picture(path: str) -> Any:
    """Return an RGB picture: a Pillow image for 8 bits, or a float32 tensor (3, H, W) from 0 to 1 for more bits.

    Raises:
        GradwatchError: The range of its pixels is not known.
    """
    with Path(path).open("rb") as file, Image.open(file) as image:
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in WIDE_FORMATS):
            return _gray_16_bit(np.asarray(image))  # Pillow's own conversion would clip to 255
        if image.mode.startswith("I") or image.mode == "F":
            raise GradwatchError(
                f"data: {path} has 32-bit pixels of unknown range, expected 8 or 16 bits; convert it, or write a data "
                "factory (data.target: package.module:factory)"
            )
        return image.convert("RGB")


def _gray_16_bit(pixels: Any) -> Tensor:
    scaled = torch.from_numpy(pixels.astype(np.float32) / MAX_16_BIT)
    return scaled.expand(3, *scaled.shape)  # three equal channels, as the conversion of 8-bit pictures makes them


def _holds_picture(folder: Path) -> bool:
    # as torchvision looks for samples, so that a class with a number has at least one
    return any(is_picture(name) for _, _, names in os.walk(folder, followlinks=True) for name in names)
