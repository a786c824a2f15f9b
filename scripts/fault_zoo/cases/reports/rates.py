"""Steps that are too large or too small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices, table
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------- a scheduler that counts batches


def train_scheduled(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 32)
    for _epoch in range(10):
        for _ in range(42):
            i = next(chosen)
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not repaired:
                scheduler.step()
            monitor.step(loss, batch=x[i])
        if repaired:
            scheduler.step()
    return accuracy(model, test_x, test_y)


@case(
    fault="learning-rate-too-low",
    onset=28,
    tolerate=("loss-plateau", "not-optimized"),
    source="https://github.com/ivadomed/ivadomed/pull/55",
    tags=("schedule", "digits"),
)
def scheduler_steps_per_batch(attach: Attach) -> None:
    """The rate shall fall by 10 every seven epochs; the call is in the inner loop, and it falls by 10 every seven
    batches. Reported in https://github.com/ivadomed/ivadomed/pull/55.
    """
    train_scheduled(attach, repaired=False)


@case(
    source="the repaired twin of `scheduler_steps_per_batch`: the scheduler steps once per epoch",
    tags=("schedule", "digits"),
)
def scheduler_steps_per_epoch(attach: Attach) -> None:
    """The rate falls by 10 after seven of ten epochs."""
    assert train_scheduled(attach, repaired=True) > 0.95


# ------------------------------------------------------------------------------------ accumulation without a division


def train_accumulated(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = 12
    monitor = attach(model, optimizer, accumulate=parts)
    chosen = indices(len(x), 8)
    for _ in range(300):
        optimizer.zero_grad()
        total = torch.zeros(())
        rows = torch.zeros(0)
        for _part in range(parts):
            i = next(chosen)
            rows = x[i]
            loss = F.cross_entropy(model(rows), y[i])
            (loss / parts if repaired else loss).backward()
            total += loss.detach() / parts
        optimizer.step()
        monitor.step(total, batch=rows)
    return accuracy(model, test_x, test_y)


@case(
    fault="learning-rate-too-high",
    also=("oscillating-gradient", "exploding-gradient", "dead-relu"),
    onset=0,
    tolerate=("loss-plateau", "gradient-spike", "rising-sparsity", "dead-layer", "non-finite"),
    source="https://github.com/ApolloResearch/e2e_sae/pull/70",
    tags=("accumulation", "digits"),
)
def accumulated_without_division(attach: Attach) -> None:
    """Gradients of 12 small batches are added up and not divided by 12, so that every step is 12 times as long.
    Reported in https://github.com/ApolloResearch/e2e_sae/pull/70.
    """
    train_accumulated(attach, repaired=False)


@case(
    source="the repaired twin of `accumulated_without_division`: the loss is divided",
    tags=("accumulation", "digits"),
)
def accumulated_with_division(attach: Attach) -> None:
    """Gradients of 12 small batches make one step with a large rate."""
    assert train_accumulated(attach, repaired=True) > 0.95


# ------------------------------------------------------------------------------------ gradients zeroed once per epoch


def train_zeroed(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on test data, as a fraction of the variance of the targets."""
    torch.manual_seed(0)
    x, y, test_x, test_y = table("diabetes")
    mean, deviation = y.mean(), y.std()
    y, test_y = (y - mean) / deviation, (test_y - mean) / deviation
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    order = torch.Generator().manual_seed(3)
    for _epoch in range(15):
        optimizer.zero_grad()
        for i in torch.randperm(len(x), generator=order).split(16):
            if repaired:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x[i]).squeeze(1), y[i])
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (F.mse_loss(model(test_x).squeeze(1), test_y) / test_y.var()).item()


@case(
    fault="missing-zero-grad",
    onset=1,
    tolerate=("learning-rate-too-high", "oscillating-gradient", "exploding-gradient", "saturated-activation"),
    source="https://github.com/pytorch/pytorch/issues/47175",
    tags=("tabular", "regression"),
)
def zeroed_once_per_epoch(attach: Attach) -> None:
    """`zero_grad` is called at the start of each epoch and not of each batch. Reported in
    https://github.com/pytorch/pytorch/issues/47175.
    """
    train_zeroed(attach, repaired=False)
