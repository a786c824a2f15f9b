"""Signals that start too large, or that grow or shrink on their way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import accuracy, indices, table, words
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------- embeddings that start far too large


class TiedReader(nn.Module):
    """Predict the next word from the last two; the output layer has the weights of the embedding."""

    def __init__(self, vocabulary: int, dim: int, *, small: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, vocabulary)
        if small:
            nn.init.normal_(self.embed.weight, std=0.05)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        return self.head(e[:, 1] + torch.tanh(self.mix(e.flatten(1))))


def train_tied(attach: Attach, *, repaired: bool) -> float:
    """Return the loss on the end of the text."""
    torch.manual_seed(0)
    text = words(24_000, 800)
    pairs, following = torch.stack([text[:-2], text[1:-1]], 1), text[2:]
    model = TiedReader(800, 128, small=repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    chosen = indices(20_000, 128)
    for _ in range(400):
        i = next(chosen)
        loss = F.cross_entropy(model(pairs[i]), following[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pairs[i])
    with torch.no_grad():
        return F.cross_entropy(model(pairs[20_000:]), following[20_000:]).item()


@case(
    fault="poor-initialization",
    layers=("embed", "head"),
    onset=0,
    tolerate=("exploding-gradient", "saturated-activation", "learning-rate-too-low"),
    source="https://github.com/pytorch/pytorch/issues/3121",
    tags=("text", "embedding"),
)
def tied_embedding_of_deviation_one(attach: Attach) -> None:
    """The embedding keeps its initial deviation of 1 and is the output layer, too; the loss starts at about 110 and
    not at 7. Reported in https://github.com/pytorch/pytorch/issues/3121.
    """
    train_tied(attach, repaired=False)


# -------------------------------------------------------------------------------------------- features as they are


def train_wine(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test wines."""
    torch.manual_seed(0)
    x, y, test_x, test_y = table("wine", raw=not repaired)
    model = nn.Sequential(nn.Linear(13, 20), nn.Sigmoid(), nn.Linear(20, 20), nn.Sigmoid(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 16)
    for _ in range(500):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="saturated-activation",
    also=("poor-initialization",),
    layers=("0", "1"),
    onset=0,
    tolerate=("loss-plateau", "vanishing-gradient", "dead-layer", "layer-imbalance", "no-gradient"),
    source="https://github.com/BrainJS/brain.js/issues/98",
    tags=("tabular",),
)
def wine_in_raw_units(attach: Attach) -> None:
    """The features have their own units, up to 1700, and go into sigmoid units, which sit at 0 or 1. The outputs are
    the same for nearly all inputs. Reported in https://github.com/BrainJS/brain.js/issues/98.
    """
    train_wine(attach, repaired=False)


# ------------------------------------------------------------------------------------------ four layers of sigmoids


def train_sigmoids(attach: Attach, *, repaired: bool) -> float:
    """Return the error on new vectors, as a fraction of the variance of the targets."""
    torch.manual_seed(0)
    bits = (torch.rand(3000, 24) < 0.5).float()
    pull = torch.randn(24)
    target = bits @ pull + 1.5 * (bits[:, :8] @ torch.randn(8)) * bits[:, 9]
    target = (target - target.mean()) / target.std()
    layers: list[nn.Module] = []
    for depth in range(4):
        layers += [nn.Linear(24 if depth == 0 else 100, 100), nn.ReLU() if repaired else nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(100, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(2500, 50)
    for _ in range(500):
        i = next(chosen)
        loss = F.mse_loss(model(bits[i]).squeeze(1), target[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=bits[i])
    with torch.no_grad():
        return F.mse_loss(model(bits[2500:]).squeeze(1), target[2500:]).item()


@case(
    fault="vanishing-gradient",
    also=("layer-imbalance",),
    layers=("0", "2"),
    onset=0,
    tolerate=("loss-plateau", "dead-layer", "learning-rate-too-low"),
    source="https://ai.stackexchange.com/questions/16557",
    tags=("regression",),
)
def four_layers_of_sigmoids(attach: Attach) -> None:
    """Four hidden layers of sigmoid units map bits to a number. Each of them divides the gradient by about 8. Reported
    in https://ai.stackexchange.com/questions/16557.
    """
    train_sigmoids(attach, repaired=False)


# ------------------------------------------------------------------------------------- a long recurrence, unclipped


class MeterReader(nn.Module):
    """Read a meter hour by hour, with rectified units that start as a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 24, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(24, 1)
        weights = dict(self.rnn.named_parameters())
        nn.init.eye_(weights["weight_hh_l0"])
        nn.init.zeros_(weights["bias_hh_l0"])
        nn.init.normal_(weights["weight_ih_l0"], std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.head(states[:, -1]).squeeze(1)


def train_meter(attach: Attach, *, repaired: bool) -> float:
    """Return the error on new readings, as a fraction of the variance of the targets."""
    torch.manual_seed(0)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        use, night = torch.rand(n, 60), (torch.rand(n, 60) < 0.3).float()
        return torch.stack([use, night], 2), (use * night).sum(1) - 9

    model = MeterReader()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for _ in range(300):
        x, y = draw(32)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if repaired:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        monitor.step(loss, batch=x)
    x, y = draw(500)
    with torch.no_grad():
        return (F.mse_loss(model(x), y) / y.var()).item()


@case(
    fault="exploding-gradient",
    layers=("rnn",),
    onset=0,
    tolerate=("learning-rate-too-high", "poor-initialization", "layer-imbalance", "dead-relu", "loss-plateau"),
    source="https://github.com/Marcovaldong/lstmp.pytorch/issues/2",
    tags=("rnn", "regression"),
)
def long_recurrence_unclipped(attach: Attach) -> None:
    """A rectified recurrence over 60 steps without clipping: the gradient has a norm above 1000, and after a few steps
    the loss is in the billions. Reported in https://github.com/Marcovaldong/lstmp.pytorch/issues/2.
    """
    train_meter(attach, repaired=False)
