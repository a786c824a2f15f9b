"""How the steps are taken: accumulation, clipping, and the rate of learning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, StepLR

from scripts.fault_zoo.cases.faulty_data import batches, digits, setup, split, standardize
from scripts.fault_zoo.protocol import Attach, case


def small_net() -> nn.Sequential:
    """Return a convolutional network for digits of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_clipped(attach: Attach, *, unscale: bool) -> float:
    """Mixed precision with clipping to a norm of 1. Return the mean loss of the last 20 steps."""
    setup(31)
    x, y = digits()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=criterion)
    losses = []
    for images, labels in batches(x, y, size=64, steps=250):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=images)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    tolerate=("vanishing-gradient", "fp16-underflow"),
    onset=0,
    source=(
        "https://github.com/pytorch/pytorch/issues/40907, https://github.com/Lightning-AI/pytorch-lightning/issues/9599"
    ),
    tags=("amp",),
)
def amp_clip_before_unscale(attach: Attach) -> None:
    """The gradients are clipped while they are scaled by 65536, so that after the unscaling their norm is 1.5e-5."""
    train_clipped(attach, unscale=False)


@case(source="https://github.com/pytorch/pytorch/issues/40907", tags=("amp", "twin"))
def amp_clip_before_unscale_fixed(attach: Attach) -> None:
    """The gradients are unscaled before they are clipped."""
    assert train_clipped(attach, unscale=True) < 0.4


@case(
    fault="learning-rate-too-high",
    also=("exploding-gradient", "oscillating-gradient"),
    tolerate=("non-finite", "dead-relu", "loss-plateau", "rising-sparsity", "gradient-spike", "dead-layer"),
    onset=0,
    source="https://github.com/hirofumi0810/neural_sp/issues/168, https://github.com/karpathy/nanoGPT/issues/206",
    tags=("accumulation",),
)
def accumulate_sixteen_undivided(attach: Attach) -> None:
    """Sixteen small batches are accumulated and the loss is not divided by sixteen."""
    setup(32)
    x, y = digits()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion, accumulate=16)
    total = 0.0
    for i, (images, labels) in enumerate(batches(x, y, size=16, steps=16 * 70)):
        loss = criterion(model(images), labels)
        loss.backward()
        total += loss.item()
        if i % 16 == 15:
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(total / 16, batch=images)
            total = 0.0


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    onset=20,
    source="https://github.com/ivadomed/ivadomed/pull/55 (the scheduler was stepped in the batch loop)",
    tags=("schedule",),
)
def step_lr_in_batch_loop(attach: Attach) -> None:
    """StepLR shall divide the rate by ten every ten epochs, but is stepped after each batch."""
    setup(33)
    x, y = digits()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=10, gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=300):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)


@case(source="Smith 2017, Cyclical learning rates", tags=("schedule", "odd"))
def cyclical_rate_waves(attach: Attach) -> None:
    """The rate goes up and down by a factor of 40 every 80 steps, and the loss follows it in waves."""
    setup(35)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    scheduler = CyclicLR(optimizer, base_lr=0.005, max_lr=0.2, step_size_up=40, cycle_momentum=False)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(train_x, train_y, size=64, steps=320):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


@case(source="torch.optim.LBFGS, documentation", tags=("full-batch", "odd"), tolerate=("constant-batch",))
def lbfgs_whole_table(attach: Attach) -> None:
    """L-BFGS on the whole table: every step sees the same batch, on purpose, and evaluates it many times."""
    setup(36)
    table = load_diabetes()
    x = standardize(torch.tensor(table.data, dtype=torch.float32))
    y = torch.tensor(table.target, dtype=torch.float32)
    y = (y - y.mean()) / y.std()
    model = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    monitor = attach(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = sum((p**2).sum() for p in model.parameters())
        loss = F.mse_loss(model(x).squeeze(1), y) + 1e-2 * weights
        loss.backward()
        return loss

    for _ in range(25):
        loss = optimizer.step(closure)
        monitor.step(loss, batch=x)
    assert F.mse_loss(model(x).squeeze(1), y) < 0.5


def pretrain(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Train a network before anything watches it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for images, labels in batches(x, y, size=64, steps=steps, seed=9):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case(
    source="Howard & Ruder 2018, sec. 3.2; fine-tuning with a small rate from a good start",
    tags=("fine-tuning", "odd"),
    tolerate=("loss-plateau",),
)
def finetune_from_good_start(attach: Attach) -> None:
    """A good network goes on with a hundredth of its rate, on a little noisier pictures; nearly nothing changes."""
    setup(37)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    model = small_net()
    pretrain(model, train_x, train_y, steps=250)
    noisy = test_x + 0.2 * torch.randn_like(test_x)
    with torch.no_grad():
        before = F.cross_entropy(model(noisy), test_y)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(train_x, train_y, size=64, steps=200):
        images = images + 0.2 * torch.randn_like(images)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert F.cross_entropy(model(noisy), test_y) < before
