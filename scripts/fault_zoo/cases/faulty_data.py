"""Seeding and data for the cases: generated, or bundled with scikit-learn. No models, no faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor


def setup(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)


def batches(
    *tensors: torch.Tensor, size: int, steps: int, seed: int = 0, drop_last: bool = True
) -> Iterator[tuple[Tensor, ...]]:
    """Shuffled mini-batches, epoch after epoch, `steps` of them."""
    generator = torch.Generator().manual_seed(seed)
    n, done = len(tensors[0]), 0
    while done < steps:
        order = torch.randperm(n, generator=generator)
        for i in range(0, n, size):
            index = order[i : i + size]
            if drop_last and len(index) < size:
                break
            if done == steps:
                return
            yield tuple(t[index] for t in tensors)
            done += 1


def split(*tensors: torch.Tensor, val: float = 0.25, seed: int = 0) -> tuple[Any, ...]:
    """(train tensors), (val tensors)"""
    n = len(tensors[0])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    cut = int(n * (1 - val))
    return tuple(t[order[:cut]] for t in tensors), tuple(t[order[cut:]] for t in tensors)


def standardize(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


@lru_cache(None)
def _bunch(name: str) -> Any:
    return getattr(datasets, f"load_{name}")()


def digits() -> tuple[Tensor, Tensor]:
    """1797 images (1, 8, 8) in [0, 1] and their labels 0..9."""
    d = _bunch("digits")
    return torch.tensor(d.images / 16.0, dtype=torch.float32)[:, None], torch.tensor(d.target)


def big_digits(size: int = 16) -> tuple[Tensor, Tensor]:
    """The same, upsampled to (1, size, size)."""
    x, y = digits()
    return torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False), y


def table(name: str) -> tuple[Tensor, Tensor]:
    """A bundled table as it comes: float features, and targets (long for classes, float for diabetes)."""
    d = _bunch(name)
    y = torch.tensor(d.target, dtype=torch.float32 if name == "diabetes" else torch.long)
    return torch.tensor(d.data, dtype=torch.float32), y


@lru_cache(None)
def text() -> str:
    """About 15 kB of English: the descriptions that come with scikit-learn's bundled datasets."""
    names = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
    return "\n".join(_bunch(n).DESCR for n in names)


@lru_cache(None)
def chars() -> tuple[Tensor, int]:
    """(ids of `text()` as a long tensor, vocabulary size)"""
    s = text()
    vocab = sorted(set(s))
    index = {c: i for i, c in enumerate(vocab)}
    return torch.tensor([index[c] for c in s]), len(vocab)


def windows(
    ids: torch.Tensor, length: int, size: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """A random batch of (inputs, next ids)."""
    start = torch.randint(0, len(ids) - length - 1, (size,), generator=generator)
    index = start[:, None] + torch.arange(length)
    return ids[index], ids[index + 1]


def series(n: int = 4000, seed: int = 0) -> torch.Tensor:
    """A load curve: daily and weekly waves, a trend, noise; unit scale."""
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    y = np.sin(2 * math.pi * t / 24) + 0.5 * np.sin(2 * math.pi * t / 168 + 1) + 0.1 * rng.standard_normal(n)
    return torch.tensor(y, dtype=torch.float32)


def blobs(n: int, classes: int, dim: int, spread: float = 1.0, seed: int = 0) -> Any:
    x, y = datasets.make_blobs(n, dim, centers=classes, cluster_std=spread, random_state=seed)
    return standardize(torch.tensor(x, dtype=torch.float32)), torch.tensor(y)


def circles(n: int = 2000, noise: float = 0.08, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = datasets.make_circles(n, noise=noise, factor=0.5, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def regression(n: int, dim: int, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A smooth nonlinear function of standard normal inputs; unit-variance targets (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    w = rng.standard_normal((dim, 6)) / math.sqrt(dim)
    h = x @ w
    y = np.sin(2 * h[:, 0]) + h[:, 1] * h[:, 2] + np.tanh(h[:, 3]) + 0.5 * h[:, 4] + noise * rng.standard_normal(n)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def houses(n: int = 3000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sales as a registry has them: area m2, rooms, year built, lot m2, distance m, floor; price in euros."""
    rng = np.random.default_rng(seed)
    area = rng.gamma(6, 18, n) + 25
    rooms = np.clip(np.round(area / 28 + rng.normal(0, 0.7, n)), 1, 9)
    year = rng.integers(1900, 2021, n)
    lot = area * rng.uniform(1, 9, n)
    distance = rng.gamma(2, 2600, n)
    floor = rng.integers(0, 6, n)
    price = 2400 * area + 9000 * rooms + 700 * (year - 1900) + 40 * lot - 11 * distance + 3000 * floor
    price = np.clip(price * rng.lognormal(0, 0.1, n), 20000, None)
    x = np.stack([area, rooms, year, lot, distance, floor], 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(price, dtype=torch.float32)


def ratings(
    users: int = 300, items: int = 200, n: int = 12000, noise: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(user ids, item ids, ratings 1..5) from a rank-4 taste model."""
    rng = np.random.default_rng(seed)
    p, q = rng.standard_normal((users, 4)), rng.standard_normal((items, 4))
    u, i = rng.integers(0, users, n), rng.integers(0, items, n)
    r = np.clip(3 + 0.5 * (p[u] * q[i]).sum(1) + noise * rng.standard_normal(n), 1, 5)
    return torch.tensor(u), torch.tensor(i), torch.tensor(r, dtype=torch.float32)


def shapes(n: int = 512, size: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy images (n, 1, size, size) of discs and boxes, and the masks of the discs."""
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size]
    x = 0.15 * rng.standard_normal((n, 1, size, size))
    m = np.zeros((n, 1, size, size))
    for k in range(n):
        for _ in range(rng.integers(1, 4)):
            cy, cx, r = rng.uniform(4, size - 4), rng.uniform(4, size - 4), rng.uniform(2, 5)
            if rng.random() < 0.5:
                hit = (yy - cy) ** 2 + (xx - cx) ** 2 < r * r
                m[k, 0][hit] = 1
            else:
                hit = (abs(yy - cy) < r) & (abs(xx - cx) < r)
                m[k, 0][hit] = 0
            x[k, 0][hit] += rng.uniform(0.5, 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(m, dtype=torch.float32)


def communities(
    n: int = 300, groups: int = 5, dim: int = 16, p_in: float = 0.10, p_out: float = 0.01, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A stochastic block model: dense adjacency without self-loops, weak node features, group labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, groups, n)
    p = np.where(y[:, None] == y[None], p_in, p_out)
    a = np.triu(rng.random((n, n)) < p, 1)
    a = (a | a.T).astype(float)
    x = 0.5 * np.eye(groups)[y] @ rng.standard_normal((groups, dim)) + rng.standard_normal((n, dim))
    return torch.tensor(a, dtype=torch.float32), torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def tokens(
    n: int = 4000, length: int = 24, vocab: int = 60, classes: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of topic words and filler, padded with 0 to `length`: (ids, lengths, topic)."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    lengths = rng.integers(length // 3, length + 1, n)
    ids = np.zeros((n, length), dtype=np.int64)
    per = (vocab - 1) // (classes + 1)
    for k in range(n):
        topical = rng.random(lengths[k]) < 0.35
        words = np.where(
            topical,
            1 + y[k] * per + rng.integers(0, per, lengths[k]),
            1 + classes * per + rng.integers(0, per, lengths[k]),
        )
        ids[k, : lengths[k]] = words
    return torch.tensor(ids), torch.tensor(lengths), torch.tensor(y)
