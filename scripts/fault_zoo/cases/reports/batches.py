"""What arrives in the batches, and what the loss makes of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------- the first batch for ever


def train_first_batch(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=False, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for _epoch in range(12):
        batches = iter(loader)
        for _ in range(len(loader)):
            rows, labels = next(batches) if repaired else next(iter(loader))
            loss = F.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=rows)
    return accuracy(model, test_x, test_y)


@case(
    fault="constant-batch",
    also=("overfitting",),
    onset=1,
    source="https://github.com/ZhaoJ9014/face.evoLVe/pull/39",
    tags=("loader", "digits"),
)
def first_batch_for_ever(attach: Attach) -> None:
    """Each step makes a new iterator over a loader that does not shuffle, and takes its first batch. Reported in
    https://github.com/ZhaoJ9014/face.evoLVe/pull/39.
    """
    train_first_batch(attach, repaired=False)


# -------------------------------------------------------------------------------- inputs and labels in different orders


def train_separately_shuffled(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    monitor = attach(model, optimizer)
    rows_alone: Any = x.unbind()  # torch takes any sequence, but is annotated to take a Dataset
    labels_alone: Any = y.unbind()
    images: DataLoader[Tensor] = DataLoader(rows_alone, batch_size=32, shuffle=True, drop_last=True)
    labels: DataLoader[Tensor] = DataLoader(labels_alone, batch_size=32, shuffle=True, drop_last=True)
    pairs = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    for _epoch in range(8):
        model.train()
        for rows, targets in pairs if repaired else zip(images, labels, strict=True):
            loss = F.cross_entropy(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=rows)
    return accuracy(model, test_x, test_y)


@case(
    fault="loss-plateau",
    onset=40,
    source="https://github.com/mlcommons/GaNDLF/pull/870",
    tags=("loader", "digits", "batch-norm"),
)
def images_and_labels_shuffled_apart(attach: Attach) -> None:
    """Images and labels come from two loaders, each with an order of its own. There is nothing to learn, and the loss
    stays at that of the share of the classes. Reported in https://github.com/mlcommons/GaNDLF/pull/870.
    """
    train_separately_shuffled(attach, repaired=False)


# ---------------------------------------------------------------------------------------- a softmax before the loss


def movements(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return three axes of acceleration over 48 samples, for six activities."""
    kind = torch.randint(6, (n,), generator=generator)
    t = torch.arange(48) / 12
    pace = torch.tensor([0.2, 0.6, 1.0, 1.4, 1.0, 1.4])[kind, None] * (1 + 0.1 * torch.randn(n, 1, generator=generator))
    lean = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.2, 1.2])[kind, None]
    phase = 2 * math.pi * torch.rand(n, 1, generator=generator)
    wave = 2 * math.pi * pace * t + phase
    axes = torch.stack([wave.sin(), 0.6 * (2 * wave).cos() + lean, 0.5 * (wave + 1).sin() - lean], 1)
    return axes + 0.3 * torch.randn(n, 3, 48, generator=generator), kind


class MotionNet(nn.Module):
    """Two convolutions over time and two linear layers."""

    def __init__(self, *, probabilities: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 16, 5)
        self.conv2 = nn.Conv1d(16, 24, 5)
        self.fc1 = nn.Linear(216, 64)
        self.fc2 = nn.Linear(64, 6)
        self.probabilities = probabilities

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return F.softmax(x, dim=1) if self.probabilities else x


def train_motion(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on new movements."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(8)
    x, y = movements(1500, generator)
    model = MotionNet(probabilities=not repaired)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    chosen = indices(len(x), 64)
    for _ in range(350):
        i = next(chosen)
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return accuracy(model, *movements(600, generator))


@case(
    fault="probabilities-into-loss",
    onset=0,
    tolerate=("loss-plateau", "vanishing-gradient", "learning-rate-too-low"),
    source="https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10",
    tags=("conv", "time-series"),
)
def activity_softmax_twice(attach: Attach) -> None:
    """The network ends in a softmax, and so does the first half of the loss. Reported in
    https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10.
    """
    train_motion(attach, repaired=False)


@case(source="the repaired twin of `activity_softmax_twice`: the network ends in logits", tags=("conv", "time-series"))
def activity_from_logits(attach: Attach) -> None:
    """Two convolutions over time tell activities apart."""
    assert train_motion(attach, repaired=True) > 0.85
