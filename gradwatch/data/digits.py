"""Load the UCI handwritten digits: 1,797 gray images of 8 x 8 pixels, shipped with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gradwatch.data import Splits
from gradwatch.data._memory import InMemory
from gradwatch.data._split import stratified_split
from gradwatch.records import DataSpec

FILE = Path(__file__).parent / "files" / "digits.npz"
DARKEST = 16.0  # a pixel is the number of black pixels in a 4 x 4 block of the scan


def build(*, val_fraction: float = 0.2, split_seed: int = 0) -> Splits:
    """Return the digits as float32 images of shape (1, 8, 8) from 0 to 1, with labels 0 to 9.

    Args:
        val_fraction: Fraction of each digit's samples that is held out for validation.
        split_seed: Seed of that choice.
    """
    with np.load(FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    inputs = torch.from_numpy(images).to(torch.float32).div_(DARKEST).unsqueeze(1)
    targets = torch.from_numpy(labels)
    train, val = (
        InMemory(inputs[part], targets[part])
        for part in map(torch.from_numpy, stratified_split(labels, val_fraction=val_fraction, seed=split_seed))
    )
    spec = DataSpec(input_shape=(1, 8, 8), outputs=10, kind="classes")
    return Splits(train, val if len(val) else None, spec)
