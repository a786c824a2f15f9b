"""Units that are saturated, of the wrong size, or drowned by others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import characters, digits, indices, windows
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------- attention without its scale


class Attention(nn.Module):
    """Causal attention with two heads, written out."""

    def __init__(self, size: int, *, scaled: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        nn.init.normal_(self.qkv.weight, std=1.0 / math.sqrt(size))
        self.scale = (size // 2) ** -0.5 if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, size // 2).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.transpose(2, 3)
        past = torch.ones(length, length, dtype=torch.bool).tril()
        weights = logits.masked_fill(~past, -torch.inf).softmax(3)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, size))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a normalization."""

    def __init__(self, size: int, *, scaled: bool) -> None:
        super().__init__()
        self.norm_a, self.attention = nn.LayerNorm(size), Attention(size, scaled=scaled)
        self.norm_b = nn.LayerNorm(size)
        self.feed = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_a(x))
        return x + self.feed(self.norm_b(x))


class TinyTransformer(nn.Module):
    """Say the next character after up to 24."""

    def __init__(self, vocabulary: int, *, scaled: bool) -> None:
        super().__init__()
        size = 128
        self.embed, self.place = nn.Embedding(vocabulary, size), nn.Embedding(24, size)
        self.blocks = nn.Sequential(Block(size, scaled=scaled), Block(size, scaled=scaled))
        self.head = nn.Linear(size, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place.weight))


def train_attention(attach: Attach, *, repaired: bool) -> float:
    """Return the loss over the last 30 steps."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(40_000)
    model = TinyTransformer(vocabulary, scaled=repaired)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(160):
        x, y = windows(tokens, 24, 8, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@case(
    fault="attention-collapse",
    also=("saturated-activation",),
    layers=("blocks.0.attention", "blocks.1.attention"),
    onset=0,
    source="https://github.com/PAIR-code/tiny-transformers/issues/71",
    tags=("gpt", "text", "attention"),
)
def attention_without_scale(attach: Attach) -> None:
    """The products of queries and keys are not divided by the root of their size, 64, so that the logits of the
    attention have a deviation of about 8 and each head looks at one key. Reported in
    https://github.com/PAIR-code/tiny-transformers/issues/71.
    """
    train_attention(attach, repaired=False)


# --------------------------------------------------------------------------------------------- weather in its own units


def weather(hours: int) -> tuple[Tensor, Tensor]:
    """Return pressure in pascals, temperature in kelvins and wind in cm/s, and the change of temperature in 6 hours."""
    generator = torch.Generator().manual_seed(2)
    t = torch.arange(hours + 6.0)
    front = torch.zeros(hours + 6)
    for i in range(1, hours + 6):
        front[i] = 0.97 * front[i - 1] + 0.24 * torch.randn((), generator=generator)
    noise = torch.randn(3, hours + 6, generator=generator)
    day = torch.sin(2 * math.pi * t / 24)
    pressure = 101_300 + 900 * front + 40 * noise[0]
    temperature = 283 + 5 * day - 3 * front.roll(3) + 0.4 * noise[1]
    wind = 400 + 150 * front.roll(1) + 40 * noise[2]
    x = torch.stack([pressure, temperature, wind], 1)
    return x[:hours], (temperature[6:] - temperature[:-6])[:hours] / 5


class Station(nn.Module):
    """Read a day of weather and say what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1]).squeeze(1)


def train_weather(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on the last days, as a fraction of the variance of the targets."""
    torch.manual_seed(0)
    x, y = weather(1200)
    if repaired:
        x = (x - x.mean(0)) / x.std(0)
    rows, y = x.unfold(0, 18, 1).transpose(1, 2), y[17:]
    model = Station()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(900, 32)
    for _ in range(300):
        i = next(chosen)
        loss = F.mse_loss(model(rows[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=rows[i])
    with torch.no_grad():
        return (F.mse_loss(model(rows[920:]), y[920:]) / y[920:].var()).item()


@case(
    fault="saturated-activation",
    also=("poor-initialization", "dead-layer"),
    layers=("lstm",),
    onset=0,
    tolerate=("loss-plateau", "vanishing-gradient", "no-gradient"),
    source="https://github.com/nasa/prog_models/issues/334",
    tags=("time-series", "lstm"),
)
def weather_in_its_own_units(attach: Attach) -> None:
    """An LSTM gets pascals, kelvins and cm/s as they are. Its gates are all open or closed, their derivatives are zero,
    and its state is the same for each day. Reported in https://github.com/nasa/prog_models/issues/334.
    """
    train_weather(attach, repaired=False)


# ------------------------------------------------------------------------------------ two tasks of very different size


class TwoTasks(nn.Module):
    """Which digit it is, and where its ink is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.classes = nn.Linear(64, 10)
        self.landmarks = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.classes(h), self.landmarks(h)


def train_two_tasks(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    width = torch.arange(8.0) * 128 + 64  # pixels of the scan
    ink = x.view(-1, 8, 8) + 1e-3
    places = [(ink.sum(axis) * width).sum(1) / ink.sum((1, 2)) for axis in (1, 2)]
    spread = [((ink.sum(axis) * width**2).sum(1) / ink.sum((1, 2))).sqrt() for axis in (1, 2)]
    landmarks = torch.stack(places + spread, 1)
    if repaired:
        landmarks = (landmarks - landmarks.mean(0)) / landmarks.std(0)
    model = TwoTasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 48)
    for _ in range(300):
        i = next(chosen)
        logits, found = model(x[i])
        loss = F.cross_entropy(logits, y[i]) + F.mse_loss(found, landmarks[i])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(test_x)[0].argmax(1) == test_y).float().mean().item()


@case(
    fault="layer-imbalance",
    also=("exploding-gradient",),
    layers=("landmarks", "classes"),
    onset=0,
    source="https://github.com/yuanwei1989/landmark-detection/issues/2",
    tags=("multi-task", "digits"),
)
def landmarks_in_pixels(attach: Attach) -> None:
    """Landmarks are learned in pixels of the scan, so that their loss is 100,000 times that of the classes. The
    gradient is clipped, and next to nothing of it is left for the classes. Reported in
    https://github.com/yuanwei1989/landmark-detection/issues/2.
    """
    train_two_tasks(attach, repaired=False)


# ------------------------------------------------------------------------------------------- a wave with slow units


class Sine(nn.Module):
    """A linear layer and a sine of 30 times its output."""

    def __init__(self, inputs: int, outputs: int, bound: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


def train_wave(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error between the samples, as a fraction of the variance of the sound."""
    torch.manual_seed(0)
    t = torch.linspace(-1, 1, 1601)[:, None]
    sound = torch.sin(40 * t) * torch.exp(-2 * t**2) + 0.4 * torch.sin(95 * t + 1) * (0.5 + 0.5 * torch.cos(5 * t))
    heard, held_out = torch.arange(0, 1601, 2), torch.arange(1, 1601, 2)
    width = 64
    bound = math.sqrt(6 / width) / 30 if repaired else math.sqrt(6 / width)
    model = nn.Sequential(
        Sine(1, width, 1.0), Sine(width, width, bound), Sine(width, width, bound), nn.Linear(width, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(len(heard), 100)
    for _ in range(400):
        i = heard[next(chosen)]
        loss = F.mse_loss(model(t[i]), sound[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=t[i])
    with torch.no_grad():
        return (F.mse_loss(model(t[held_out]), sound[held_out]) / sound.var()).item()


@case(
    fault="poor-initialization",
    also=("exploding-gradient",),
    onset=0,
    tolerate=("loss-plateau",),
    source="https://github.com/lucidrains/siren-pytorch/issues/1",
    tags=("audio", "implicit"),
)
def waves_of_waves(attach: Attach) -> None:
    """A network of sines is initialized without the division by 30 that its frequency asks for, so that each layer
    turns the phase of the one before many times, and nothing smooth is left to learn. Reported in
    https://github.com/lucidrains/siren-pytorch/issues/1.
    """
    train_wave(attach, repaired=False)


# ----------------------------------------------------------------------------------------- one seed for all samples


def pendulum(states: Tensor) -> Tensor:
    """Return the states of damped pendulums a tenth of a second later."""
    for _ in range(5):
        angle, speed = states.unbind(1)
        states = states + 0.02 * torch.stack([speed, -9.8 * angle.sin() - 0.2 * speed], 1)
    return states


def train_dynamics(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on new states, as a fraction of the variance of the changes."""
    torch.manual_seed(0)
    x = torch.randn(1000, 2) * torch.tensor([1.5, 3.0])
    y = pendulum(x) - x
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)

    def sample(seed: int) -> Tensor:
        return torch.randperm(800, generator=torch.Generator().manual_seed(seed))[:24]

    for step in range(400):
        i = sample(step if repaired else 42)
        loss = F.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (F.mse_loss(model(x[800:]), y[800:]) / y[800:].var()).item()


@case(
    fault="constant-batch",
    also=("overfitting",),
    onset=1,
    source="https://github.com/deeppavlov/DeepPavlov/pull/9",
    tags=("physics", "loader"),
)
def one_seed_for_all_batches(attach: Attach) -> None:
    """The function that draws a batch makes a generator with the same seed each time. Compare
    https://github.com/deeppavlov/DeepPavlov/pull/9, which takes the seed out of the generation of batches.
    """
    train_dynamics(attach, repaired=False)
