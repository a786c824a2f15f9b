"""Series in time: a memory that is lost at every batch, and a forecast in units of its own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a memory that is lost


class Latch(nn.Module):
    """A recurrent network that tells after each step which of two switches was the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, state = self.gru(x, state)
        return self.head(hidden).squeeze(2), state


def switches(count: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return series with two rare switches and a disturbance, (count, steps, 3), and the last switch at each step."""
    pressed = torch.rand(count, steps, generator=generator) < 1 / 40
    which = torch.rand(count, steps, generator=generator) < 0.5
    pressed[:, 0] = True
    x = torch.stack([pressed & which, pressed & ~which], 2).float()
    last = torch.where(pressed, torch.arange(steps), -1).cummax(1).values
    noise = 0.5 * torch.randn(count, steps, 1, generator=generator)
    return torch.cat([x, noise], 2), which.gather(1, last).float()


def train_latch(attach: Attach, *, at_each_batch: bool) -> float:
    """Return the share of right steps in new series."""
    torch.manual_seed(381)
    generator = torch.Generator().manual_seed(12)
    model = Latch()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)

    def run(x: Tensor, last: Tensor, *, train: bool) -> float:
        state, right = None, []
        for part, wanted in zip(x.split(16, 1), last.split(16, 1), strict=True):
            if at_each_batch:
                state = None
            scores, state = model(part, state)
            state = state.detach()
            right.append(((scores > 0) == (wanted > 0)).float().mean().item())
            if train:
                loss = criterion(scores, wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=part)
        return sum(right) / len(right)

    for _ in range(15):
        run(*switches(32, 320, generator), train=True)
    with torch.no_grad():
        return run(*switches(64, 320, generator), train=False)


@case(
    fault="loss-plateau",
    onset=20,
    source="https://github.com/ai2cm/fv3net/pull/2331",
    tags=("gru", "state"),
)
def memory_lost_at_every_batch(attach: Attach) -> None:
    """A series is learned in batches of 16 steps. The state shall be reset before the first batch of a series, and is
    reset before every batch. A switch is pressed every 40 steps on average, so that the answer is often out of sight:
    63 % of the steps are right, and all in the twin.
    """
    train_latch(attach, at_each_batch=True)


@case(source="the repaired twin of `memory_lost_at_every_batch`", tags=("gru", "state", "twin"))
def memory_kept_for_a_series(attach: Attach) -> None:
    """The state is reset before the first batch of a series."""
    assert train_latch(attach, at_each_batch=False) > 0.95


# ------------------------------------------------------------------------------------ a forecast in units of its own


class StandardScaler:
    """Bring a series to mean 0 and deviation 1."""

    def fit_transform(self, values: Tensor) -> Tensor:
        """Learn the scale of a series and return the series in it."""
        self.mean, self.std = values.mean(), values.std()
        return (values - self.mean) / self.std


def train_forecast(attach: Attach) -> tuple[float, float]:
    """Return the mean error of the forecasts in megawatts, and the deviation of the load."""
    torch.manual_seed(382)
    generator = torch.Generator().manual_seed(13)
    hour = torch.arange(2400.0)
    load = 900 + 200 * torch.sin(2 * math.pi * hour / 24) + 60 * torch.sin(2 * math.pi * hour / 168)
    load = load + 20 * torch.randn(2400, generator=generator)
    scaler = StandardScaler()
    scaled = scaler.fit_transform(load[:1800])
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 24))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for _ in range(300):
        start = torch.randint(0, 1800 - 72, (32,), generator=generator)
        window = scaled[start[:, None] + torch.arange(72)]
        loss = F.mse_loss(model(window[:, :48]), window[:, 48:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=window)
    start = torch.arange(1800, 2400 - 72, 24)
    window = load[start[:, None] + torch.arange(72)]
    with torch.no_grad():
        forecast = model((window[:, :48] - scaler.mean) / scaler.std)
    return (forecast - window[:, 48:]).abs().mean().item(), load.std().item()


@case(
    fault="train-eval-mismatch",
    onset=0,
    source="https://github.com/sb-ai-lab/tsururu/pull/12",
    tags=("perceptron", "scale"),
)
def forecast_in_units_of_its_own(attach: Attach) -> None:
    """The load is scaled for the training, and the forecasts are not scaled back: their error is 900 MW, and the load
    deviates by 150 MW. The training is right. The nearest kind is a difference between training and evaluation.
    """
    train_forecast(attach)
