"""Series: a mode that is announced long before, a pendulum without parentheses, and a network of spikes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, waves
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ announced long before


def plant_logs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return 200 readings of two sensors, (N, 200, 2), and which of three modes the first six readings announce."""
    generator = torch.Generator().manual_seed(seed)
    mode = torch.randint(0, 3, (count,), generator=generator)
    readings = 0.5 * torch.randn(count, 200, 2, generator=generator)
    readings[:, :6, 0] += torch.tensor([-1.5, 0.0, 1.5])[mode, None]
    return readings, mode


class ModeReader(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.reader = (nn.RNN if kind == "rnn" else nn.LSTM)(2, 48, batch_first=True)
        if kind == "lstm":
            with torch.no_grad():
                dict(self.reader.named_parameters())["bias_hh_l0"][48:96] = 5.0  # remembers for about 150 readings
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.reader(x)
        return self.head(hidden[:, -1])


def train_modes(attach: Attach, *, kind: str) -> float:
    """Return the accuracy on new logs."""
    torch.manual_seed(101)
    x, y = plant_logs(2000, seed=1)
    model = ModeReader(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(2000, size=50, steps=300):
        optimizer.zero_grad()
        loss = criterion(model(x[i]), y[i])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x, y = plant_logs(500, seed=2)
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


@case(
    fault="vanishing-gradient",
    also=("loss-plateau",),
    onset=0,
    source="https://axeldomingues.dev/blog/the-pain-of-training-rnns",
    tags=("rnn", "long-range"),
)
def mode_announced_long_before(attach: Attach) -> None:
    """A plain recurrent network is to remember for 194 readings what the first six announce. Its gradient with respect
    to them is smaller than the rounding error, and it guesses. Asked again and again, and explained in
    https://axeldomingues.dev/blog/the-pain-of-training-rnns and Pascanu et al. 2013, On the difficulty of training
    recurrent neural networks.
    """
    train_modes(attach, kind="rnn")


# ------------------------------------------------------------------------------------ a line that calls nothing


@lru_cache(None)
def pendulum(steps: int = 4000) -> Tensor:
    """Return the sine of the angle of a driven pendulum, every 0.1 s."""
    angle, spin, seen = 0.3, 0.0, []
    for step in range(steps * 10):
        push = 1.15 * math.cos(2 / 3 * step * 0.01)
        spin += 0.01 * (-math.sin(angle) - 0.5 * spin + push)
        angle += 0.01 * spin
        if step % 10 == 0:
            seen.append(math.sin(angle))
    return torch.tensor(seen)


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.fc = nn.Linear(32, 1)

    def forward(self, window: Tensor) -> Tensor:
        out, _ = self.gru(window[:, :, None])
        return self.fc(out[:, -1]).squeeze(1)


def train_forecaster(attach: Attach, *, called: bool) -> float:
    """Return the squared error of forecasts of 0.5 s, as a part of the variance."""
    torch.manual_seed(102)
    series = pendulum()
    windows = series.unfold(0, 30, 1)
    x, y = windows[:, :25], windows[:, 29]
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for i in draws(3000, size=32, steps=400):
        if called:
            optimizer.zero_grad()
        else:
            optimizer.zero_grad  # noqa: B018 - the parentheses are missing
        loss = loss_fn(model(x[i]), y[i])
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (loss_fn(model(x[3100:]), y[3100:]) / y[3100:].var()).item()


@case(
    fault="missing-zero-grad",
    tolerate=("oscillating-gradient", "exploding-gradient", "learning-rate-too-high", "saturated-activation"),
    onset=1,
    source="https://github.com/wenet-e2e/wekws/issues/72",
    tags=("gru", "forecast"),
)
def parentheses_forgotten(attach: Attach) -> None:
    """The line says `optimizer.zero_grad` and calls nothing. That gradients are never cleared is reported again and
    again, for example in https://github.com/wenet-e2e/wekws/issues/72,
    https://github.com/yastrebksv/TennisCourtDetector/issues/7 and https://github.com/snakers4/silero-vad/pull/699.
    """
    train_forecaster(attach, called=False)


@case(source="the repaired twin of `parentheses_forgotten`", tags=("gru", "forecast", "twin"))
def parentheses_remembered(attach: Attach) -> None:
    """The line says `optimizer.zero_grad()`."""
    assert train_forecaster(attach, called=True) < 0.1


# ------------------------------------------------------------------------------------ an odd recipe


class Spike(torch.autograd.Function):
    """One above the threshold and zero below it, with the derivative of a steep sigmoid's softer cousin."""

    @staticmethod
    def forward(ctx: Any, charge: Tensor) -> Tensor:
        ctx.save_for_backward(charge)
        return (charge > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (charge,) = ctx.saved_tensors
        return grad / (1 + 10 * charge.abs()) ** 2


class SpikingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(1, 64)
        self.memory = nn.Linear(64, 64, bias=False)
        self.exit = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        charge = spikes = torch.zeros(len(x), 64)
        total = torch.zeros(len(x), 3)
        for value in x.unbind(1):
            charge = 0.8 * charge * (1 - spikes) + self.entry(value) + self.memory(spikes)
            spikes = Spike.apply(charge - 1)
            total = total + self.exit(spikes)
        return total / x.shape[1]


@case(source="Neftci et al. 2019, Surrogate Gradient Learning in Spiking Neural Networks", tags=("spiking", "odd"))
def waves_by_spikes(attach: Attach) -> None:
    """The units fire or do not: two activations in three are zero, and the derivative of the jump is a made-up one."""
    torch.manual_seed(103)
    x, y = waves(1500, 48, seed=1)
    model = SpikingNetwork()
    with torch.no_grad():
        model.entry.weight.mul_(2)
        model.exit.weight.mul_(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for i in draws(1500, size=64, steps=250):
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x, y = waves(400, 48, seed=2)
    with torch.no_grad():
        assert (model(x).argmax(1) == y).float().mean() > 0.8
