"""Upkeep: a data set that remembers every crop that it has made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scripts.fault_zoo.protocol import Attach, case


class Fabrics(Dataset[tuple[Tensor, int]]):
    """Stripes of four directions, stored in bytes. A random crop of each is returned."""

    def __init__(self, count: int, *, remembers_crops: bool) -> None:
        generator = torch.Generator().manual_seed(6)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        angle = self.labels * torch.pi / 4 + 0.15 * torch.randn(count, generator=generator)
        period = 5 + 4 * torch.rand(count, generator=generator)
        row, column = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
        self.stored = []
        for a, p in zip(angle, period, strict=True):
            stripes = torch.sin(2 * torch.pi * (a.cos() * column + a.sin() * row) / p)
            grain = torch.randn(3, 64, 64, generator=generator)
            self.stored.append((128 + 40 * stripes + 30 * grain).clamp(0, 255).to(torch.uint8))
        self.remembers_crops = remembers_crops
        self.cache: dict[tuple[int, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 17, (2,)).tolist()
        label = int(self.labels[index])
        if not self.remembers_crops:
            return self.decoded(index)[:, top : top + 48, left : left + 48], label
        key = (index, top, left)
        if key not in self.cache:
            crop = self.stored[index][:, top : top + 48, left : left + 48]
            self.cache[key] = crop.float() / 127.5 - 1
        return self.cache[key], label

    def decoded(self, index: int) -> Tensor:
        """Return a whole picture, and remember it."""
        if (index,) not in self.cache:
            self.cache[(index,)] = self.stored[index].float() / 127.5 - 1
        return self.cache[(index,)]


def train_fabrics(attach: Attach, *, remembers_crops: bool) -> tuple[float, float]:
    """Return the mean loss of the last 20 steps, and how many MB the cache holds."""
    torch.manual_seed(151)
    data = Fabrics(400, remembers_crops=remembers_crops)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    losses = []
    for _ in range(15):
        for picture, label in DataLoader(data, batch_size=20, shuffle=True):
            loss = F.cross_entropy(model(picture), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=picture)
            losses.append(loss.item())
    held = sum(picture.numel() * picture.element_size() for picture in data.cache.values()) / 1e6
    return sum(losses[-20:]) / 20, held


@case(
    fault="memory-growth",
    onset=20,
    source="https://github.com/dvornikita/fewshot_ensemble/issues/4",
    tags=("data", "memory"),
)
def every_crop_remembered(attach: Attach) -> None:
    """The data set remembers what it has made, and what it makes is a random crop: nearly every crop is a new one, and
    the cache grows by half a megabyte in each step. Reported in
    https://github.com/dvornikita/fewshot_ensemble/issues/4, https://github.com/anhaidgroup/deepmatcher/issues/42 and
    https://github.com/stardist/stardist/issues/107.
    """
    train_fabrics(attach, remembers_crops=True)


@case(source="the repaired twin of `every_crop_remembered`: remembers whole pictures", tags=("data", "memory", "twin"))
def every_picture_remembered(attach: Attach) -> None:
    """The data set remembers the 400 pictures and crops them again: the cache grows in the first epoch only."""
    assert train_fabrics(attach, remembers_crops=False)[0] < 0.3
