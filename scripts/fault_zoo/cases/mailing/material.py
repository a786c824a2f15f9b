"""Data that the scripts share. No models, no faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pydoc_data.topics import topics

import torch
from sklearn.datasets import load_digits
from torch import Tensor


def draws(count: int, *, size: int, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield the indices of `steps` batches; each epoch is shuffled, and its incomplete last batch is dropped."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while True:
        for picked in torch.randperm(count, generator=generator).split(size):
            if len(picked) < size:
                continue
            if done == steps:
                return
            done += 1
            yield picked


@lru_cache(None)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures (N, 1, 8, 8) from 0 to 1 and labels for training, then for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


@lru_cache(None)
def cells(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of one bright cell on an uneven background, (N, 1, 16, 16), and masks of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    middle = torch.rand(count, 2, 1, 1, generator=generator) * 8 + 4
    radius = torch.rand(count, 2, 1, 1, generator=generator) * 2.5 + 2
    inside = ((row - middle[:, 0]) / radius[:, 0]) ** 2 + ((column - middle[:, 1]) / radius[:, 1]) ** 2 < 1
    slope = torch.randn(count, 1, 1, generator=generator) * 0.03
    pictures = 0.6 * inside + slope * (column - 8) + 0.25 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], inside[:, None].float()


@lru_cache(None)
def letters() -> tuple[Tensor, int]:
    """Return 150,000 characters of Python's help topics as ids, and the size of the alphabet."""
    text = "\n".join(topics[name] for name in sorted(topics))[:150_000]
    alphabet = sorted(set(text))
    index = {letter: i for i, letter in enumerate(alphabet)}
    return torch.tensor([index[letter] for letter in text]), len(alphabet)


def excerpts(ids: Tensor, *, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` random excerpts of a text, (count, length)."""
    start = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return ids[start[:, None] + torch.arange(length)]


def waves(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy sines, squares and saws of any phase and period, (N, length, 1), and which of them they are."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (count,), generator=generator)
    period = torch.rand(count, 1, generator=generator) * 6 + 6
    turn = torch.arange(length) / period + torch.rand(count, 1, generator=generator)
    sine = torch.sin(2 * math.pi * turn)
    shapes = torch.stack([1.2 * sine, sine.sign(), 1.7 * (2 * (turn % 1) - 1)])
    values = shapes[kind, torch.arange(count)] + 0.15 * torch.randn(count, length, generator=generator)
    return values[:, :, None], kind


def mean_of_last(losses: list[float], count: int = 20) -> float:
    """Return the mean of the last losses of a run."""
    return sum(losses[-count:]) / count
