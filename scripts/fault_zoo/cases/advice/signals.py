"""Signals: readings that are missing, recordings that are quiet, and a reader of text that warms up for ever."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ readings that are missing


def windows(*, filled: bool) -> tuple[Tensor, Tensor]:
    """Return windows of 24 hours of a sensor, (N, 24, 1), and the next hour. Four of 1,600 readings are missing."""
    generator = torch.Generator().manual_seed(6)
    hour = torch.arange(1600.0)
    series = (hour * 6.28 / 24).sin() + 0.5 * (hour * 6.28 / 168).sin() + 0.1 * torch.randn(1600, generator=generator)
    for missing in (210, 700, 701, 1300):
        series[missing] = 0.5 * (series[missing - 1] + series[missing - 3]) if filled else torch.nan
    cut = series.unfold(0, 25, 1)
    return cut[:, :24, None], cut[:, 24]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0][:, -1]).squeeze(1)


def train_forecaster(attach: Attach, *, filled: bool) -> float:
    """Return the mean squared error on the last days."""
    torch.manual_seed(631)
    x, y = windows(filled=filled)
    train = len(x) - 200
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(train, size=32, steps=200):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return F.mse_loss(model(x[train:]), y[train:]).item()


@case(
    fault="non-finite",
    onset=0,
    source="https://github.com/unit8co/darts/issues/881",
    tags=("time-series", "data"),
)
def hours_without_a_reading(attach: Attach) -> None:
    """Four of 1,600 readings of a sensor are missing, and are NaN in the table. The loss is NaN from the first batch
    on that has one of them in a window.
    """
    train_forecaster(attach, filled=False)


@case(source="the repaired twin of `hours_without_a_reading`", tags=("time-series", "data", "twin"))
def hours_filled_in(attach: Attach) -> None:
    """The gaps are filled from the hours before, and the error on the last days is below 0.03."""
    assert train_forecaster(attach, filled=True) < 0.03


# ------------------------------------------------------------------------------------ recordings that are quiet


def recordings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return recordings of one of four chords, (N, 1, 256), at the level of a distant microphone, and which it is."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (count,), generator=generator)
    pitches = torch.tensor([[8.0, 12.0], [8.0, 20.0], [15.0, 12.0], [15.0, 20.0]])[kind]
    phase = 6.28 * torch.rand(count, 2, 1, generator=generator)
    time = torch.arange(256.0) / 256 * 6.28
    tones = (pitches[:, :, None] * time + phase).sin().sum(1)
    sound = tones + 0.3 * torch.randn(count, 256, generator=generator)
    return 0.002 * sound[:, None], kind


@case(
    fault="loss-plateau",
    also=("learning-rate-too-low", "poor-initialization", "vanishing-gradient"),
    onset=0,
    source="https://github.com/b04901014/FT-w2v2-ser/issues/6",
    tags=("audio", "data"),
)
def recordings_from_afar(attach: Attach) -> None:
    """A network of convolutions hears which of four chords is played. The recordings have an amplitude of 0.002, less
    than the biases, and the loss stays near log 4 = 1.39. If each is divided by its standard deviation, 95 % are
    right.
    """
    torch.manual_seed(632)
    x, kind = recordings(1200, seed=1)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 15, stride=4),
        nn.ReLU(),
        nn.Conv1d(16, 32, 9, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=250):
        loss = criterion(model(x[i]), kind[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


# ------------------------------------------------------------------------------------ a warm-up without an end


class WarmUpThenDecay:
    """Raise the rate for some steps, and then lower it to zero along a line."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, warm: int, total: int) -> None:
        self.optimizer, self.warm, self.total = optimizer, warm, total
        self.peak = optimizer.param_groups[0]["lr"]
        self.count = 0
        self.set(self.peak / warm)

    def set(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.last = rate

    @property
    def is_warming_up(self) -> bool:
        return self.count < self.warm or self.last < 1

    def step(self) -> None:
        self.count += 1
        if self.is_warming_up:
            self.set(self.peak * min(1.0, self.count / self.warm))
        else:
            self.set(self.peak * max(0.0, (self.total - self.count) / (self.total - self.warm)))


@case(
    fault="learning-rate-too-high",
    also=("oscillating-gradient", "loss-plateau"),
    onset=30,
    source="https://github.com/facebookresearch/ParlAI/pull/4384",
    tags=("text", "schedule"),
)
def warm_up_without_an_end(attach: Attach) -> None:
    """A schedule takes a rate below 1 for a sign that it still warms up. The rate stays at its top and is never
    lowered. The loss on new text is 2.15 at the end; with the decay it is 2.06.
    """
    torch.manual_seed(633)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(7)
    model = nn.ModuleDict(
        {"letters": nn.Embedding(alphabet, 48), "lstm": nn.LSTM(48, 96), "out": nn.Linear(96, alphabet)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = WarmUpThenDecay(optimizer, warm=30, total=300)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(300):
        text = excerpts(ids[:140_000], length=41, count=16, generator=generator).T
        states, _ = model["lstm"](model["letters"](text[:-1]))
        loss = criterion(model["out"](states).flatten(0, 1), text[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=text)
