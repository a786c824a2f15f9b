"""Losses with a pole."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import digits, indices
from scripts.fault_zoo.protocol import Attach, case

# -------------------------------------------------------------------------------------- a percentage of almost nothing


def traffic(hours: int) -> Tensor:
    """Return the vehicles per hour on a road; in rare hours of the night there is none."""
    generator = torch.Generator().manual_seed(4)
    t = torch.arange(hours)
    day = 1.2 + torch.sin(2 * math.pi * (t % 24 - 8) / 24) + 0.5 * torch.sin(4 * math.pi * (t % 24 - 3) / 24)
    flow = (60 * day.clamp(min=0.1) * (1 + 0.15 * torch.randn(hours, generator=generator))).round().clamp(min=1)
    closed = torch.rand(hours, generator=generator) < 0.0006
    return torch.where(closed, 0.0, flow)


def train_traffic(attach: Attach, *, repaired: bool) -> float:
    """Return the mean absolute error on the last hours, as a fraction of that of the same hour of the day before."""
    torch.manual_seed(0)
    flow = traffic(4000)
    past, target = flow.unfold(0, 24, 1)[:-1], flow[24:]
    scale = flow.mean()
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    floor = 1.0 if repaired else 1e-8
    monitor = attach(model, optimizer)
    chosen = indices(3200, 32, seed=6)
    for _ in range(800):
        i = next(chosen)
        predicted = scale * model(past[i] / scale).squeeze(1)
        loss = ((predicted - target[i]).abs() / target[i].abs().clamp(min=floor)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=past[i])
    with torch.no_grad():
        error = (scale * model(past[3200:] / scale).squeeze(1) - target[3200:]).abs().mean()
    return (error / (past[3200:, 0] - target[3200:]).abs().mean()).item()


@case(
    fault="gradient-spike",
    onset=9,
    tolerate=("exploding-gradient", "learning-rate-too-high", "learning-rate-too-low", "loss-plateau"),
    source="https://github.com/timeseriesAI/tsai/issues/524",
    tags=("time-series", "regression"),
)
def percentage_of_an_empty_road(attach: Attach) -> None:
    """The loss is a percentage, and in rare hours the target is zero and is replaced by 1e-8. The gradient of such a
    batch is ten million times the usual one, and Adam takes tiny steps long after. Reported in
    https://github.com/timeseriesAI/tsai/issues/524.
    """
    train_traffic(attach, repaired=False)


@case(
    source="the repaired twin of `percentage_of_an_empty_road`: the target is at least one vehicle",
    tags=("time-series", "regression"),
)
def percentage_of_one_vehicle(attach: Attach) -> None:
    """The loss is a percentage with a floor; batches with an empty road have a loss far above the usual one."""
    assert train_traffic(attach, repaired=True) < 0.95


# ------------------------------------------------------------------------------------------ a mean over no triplets


def train_triplets(attach: Attach, *, repaired: bool) -> float:
    """Return how often the nearest training digit is of the same class as a test digit."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 16)
    for _ in range(600):
        i = next(chosen)
        out = F.normalize(model(x[i]))
        distance = 2 - 2 * out @ out.T
        same = y[i][:, None] == y[i][None]
        positive = same & ~torch.eye(len(i), dtype=torch.bool)
        violation = F.relu(distance[:, :, None] - distance[:, None, :] + 0.1)
        violation = violation * (positive[:, :, None] & ~same[:, None, :])
        active = (violation > 0).sum()
        loss = violation.sum() / (active.clamp(min=1) if repaired else active)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        near = (F.normalize(model(test_x)) @ F.normalize(model(x)).T).argmax(1)
    return (y[near] == test_y).float().mean().item()


@case(
    fault="non-finite",
    onset=103,
    source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
    tags=("metric-learning", "digits"),
)
def mean_over_no_triplets(attach: Attach) -> None:
    """The loss is the mean over the triplets that violate the margin. When the model is good enough, a batch has none,
    and 0 is divided by 0. Reported in https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107.
    """
    train_triplets(attach, repaired=False)


@case(
    source="the repaired twin of `mean_over_no_triplets`: without a violation the loss is 0",
    tags=("metric-learning", "digits"),
)
def mean_over_some_triplets(attach: Attach) -> None:
    """In some batches no triplet violates the margin, and loss and gradients are zero."""
    assert train_triplets(attach, repaired=True) > 0.95
