"""Distances and domains: triplets, pairs with a temperature, and a gradient that is turned around."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------ triplets that fall together


def batch_hard(points: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Return the triplet loss of the farthest friend and the nearest stranger of each sample."""
    squares = (points[:, None] - points[None]).square().sum(2)
    distance = (squares + 1e-12).sqrt()
    same = labels[:, None] == labels[None]
    farthest = distance.masked_fill(~same, 0.0).max(1).values
    nearest = distance.masked_fill(same, float("inf")).min(1).values
    return torch.relu(farthest - nearest + margin).mean()


def train_triplets(attach: Attach, *, repaired: bool) -> float:
    """Return how often the nearest neighbor of a test digit has its label."""
    torch.manual_seed(601)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 16),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 if repaired else 3e-2)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=96, steps=250):
        loss = batch_hard(model(x[i]), y[i], margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        nearest = torch.cdist(model(test_x), model(x)).argmin(1)
    return (y[nearest] == test_y).float().mean().item()


@case(
    fault="loss-plateau",
    also=("learning-rate-too-high", "dead-layer", "vanishing-gradient", "dead-relu"),
    tolerate=("rising-sparsity", "gradient-spike", "oscillating-gradient", "exploding-gradient"),
    onset=0,
    source="https://github.com/omoindrot/tensorflow-triplet-loss/issues/6",
    tags=("metric-learning",),
)
def triplets_at_the_margin(attach: Attach) -> None:
    """The hardest triplets at a high learning rate: all points fall together, and the loss stays at the margin. The
    usual answer is a smaller rate. Reported in https://github.com/omoindrot/tensorflow-triplet-loss/issues/6,
    https://github.com/VisualComputingInstitute/triplet-reid/issues/30 and
    https://github.com/KevinMusgrave/pytorch-metric-learning/issues/20.
    """
    train_triplets(attach, repaired=False)


@case(source="the repaired twin of `triplets_at_the_margin`: a smaller rate", tags=("metric-learning", "twin"))
def triplets_apart(attach: Attach) -> None:
    """The hardest triplets at a small learning rate."""
    assert train_triplets(attach, repaired=True) > 0.9


# --------------------------------------------------------------------------------------------- pairs and temperature


class Halves(nn.Module):
    """Two encoders, for the upper and for the lower half of a digit, and how sharply to compare them."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 24)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = x.chunk(2, 2)
        up, low = F.normalize(self.upper(top), dim=1), F.normalize(self.lower(bottom), dim=1)
        return self.log_scale.exp() * up @ low.T


@case(source="Radford et al. 2021, CLIP, sec. 2.3", tags=("contrastive", "odd"))
def halves_with_learned_scale(attach: Attach) -> None:
    """Which lower half belongs to which upper half? Logits are cosines times a learned scale, which starts at 14, is a
    parameter of one number, and may not exceed 100; the loss starts above that of a guess.
    """
    torch.manual_seed(602)
    x, _, test_x, _ = digits()
    model = Halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    truth = torch.arange(128)
    for i in draws(len(x), size=128, steps=300):
        logits = model(x[i])
        loss = 0.5 * (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.log_scale.clamp_(max=math.log(100))
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        logits = model(test_x[:128])
    assert (logits.topk(5, 1).indices == truth[:, None]).any(1).float().mean() > 0.3


# --------------------------------------------------------------------------------------------- a gradient turned around


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.strength * grads[0], None


class Adversarial(nn.Module):
    """Name the digit from features by which the domains cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.digit = nn.Linear(48, 10)
        self.domain = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, x: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.digit(h), self.domain(Reversal.apply(h, strength))


@case(source="Ganin et al. 2016, Domain-adversarial training of neural networks", tags=("domains", "odd"))
def domains_told_apart_no_more(attach: Attach) -> None:
    """The features shall fool the head that tells two domains apart: its loss, a part of the whole, stays near ln 2."""
    torch.manual_seed(603)
    x, y, test_x, test_y = digits()

    def foreign(pictures: Tensor) -> Tensor:
        return pictures.roll(1, 3) + 0.3 * torch.randn_like(pictures)

    model = Adversarial()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    monitor = attach(model, optimizer)
    domains = torch.tensor([0] * 64 + [1] * 64)
    other = draws(len(x), size=64, steps=320, seed=1)
    for step, i in enumerate(draws(len(x), size=64, steps=320)):
        strength = 0.3 * (2 / (1 + math.exp(-10 * step / 320)) - 1)
        both = torch.cat([x[i], foreign(x[next(other)])])
        digit, domain = model(both, strength)
        loss = F.cross_entropy(digit[:64], y[i]) + F.cross_entropy(domain, domains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=both)
    with torch.no_grad():
        assert (model(test_x, 0.0)[0].argmax(1) == test_y).float().mean() > 0.9
