"""Data that the scripts share: bundled with scikit-learn, or drawn to the description in the report. No models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from torch import Tensor


def setup(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)


def loader(
    *tensors: Tensor,
    size: int,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    drop_last: bool = True,
) -> Iterator[tuple[Tensor, ...]]:
    """Mini-batches in a new order every epoch, for so many epochs or so many batches."""
    generator = torch.Generator().manual_seed(seed)
    n, done, epoch = len(tensors[0]), 0, 0
    while (epochs is None or epoch < epochs) and (steps is None or done < steps):
        order = torch.randperm(n, generator=generator)
        for start in range(0, n, size):
            index = order[start : start + size]
            if drop_last and len(index) < size:
                break
            if steps is not None and done == steps:
                return
            yield tuple(t[index] for t in tensors)
            done += 1
        epoch += 1


def split(*tensors: Tensor, held_out: int, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(training tensors), (held-out tensors)"""
    order = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(seed))
    return tuple(t[order[held_out:]] for t in tensors), tuple(t[order[:held_out]] for t in tensors)


def standard(x: Tensor) -> Tensor:
    """StandardScaler over the rows."""
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-8)


@lru_cache(None)
def _table(name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    d = getattr(datasets, f"load_{name}")()
    return d.data, d.target


def table(name: str) -> tuple[Tensor, Tensor]:
    x, y = _table(name)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(
        y, dtype=torch.float32 if name == "diabetes" else torch.long
    )
