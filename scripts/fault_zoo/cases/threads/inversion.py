"""Frozen networks that are asked backwards: a picture behind a denoiser, and a word for a concept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.cases.threads.pictures import convnet
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a picture behind a denoiser


class Smoothed(nn.Module):
    """A classifier behind a denoiser, and a change of the picture that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1))
        self.classifier = convnet(10)
        self.delta = nn.Parameter(torch.zeros(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        noisy = (x + self.delta).expand(16, -1, -1, -1) + 0.25 * torch.randn(16, 1, 8, 8)
        with torch.no_grad():
            clean = self.denoiser(noisy)
        return self.classifier(clean)


def synthesize(attach: Attach) -> tuple[float, float]:
    """Return the mean loss of the first 20 and of the last 20 steps."""
    torch.manual_seed(311)
    x, y, x_test, y_test = digits()
    model = Smoothed()
    first = torch.optim.Adam([*model.denoiser.parameters(), *model.classifier.parameters()], lr=2e-3)
    for i in draws(len(x), size=64, steps=200, seed=1):
        clean = model.denoiser(x[i] + 0.25 * torch.randn_like(x[i]))
        loss = F.mse_loss(clean, x[i]) + F.cross_entropy(model.classifier(clean), y[i])
        first.zero_grad()
        loss.backward()
        first.step()
    model.eval()
    model.zero_grad()
    optimizer = torch.optim.Adam([model.delta], lr=0.02)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    picture = x_test[y_test == 1][:1]
    target = torch.full((16,), 8)
    losses = []
    for _ in range(150):
        loss = F.cross_entropy(model(picture), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
        losses.append(loss.item())
    return sum(losses[:20]) / 20, sum(losses[-20:]) / 20


@case(
    fault="no-gradient",
    also=("not-optimized", "loss-plateau"),
    layers=("delta",),
    onset=0,
    source="https://github.com/locuslab/smoothinv/issues/1",
    tags=("inversion", "denoiser"),
)
def denoiser_without_gradient(attach: Attach) -> None:
    """The denoiser runs under `torch.no_grad()`, so that the change of the picture that is looked for gets no gradient
    and stays 0. The loss is 1.91 at the start and 1.93 at the end.
    """
    synthesize(attach)


# ------------------------------------------------------------------------------------ a word for a concept


class TextToDigit(nn.Module):
    """Predict the noise of a noisy digit from a word. The last word has no meaning yet."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 32)
        self.time = nn.Linear(1, 32)
        self.enter = nn.Conv2d(1, 32, 3, padding=1)
        self.body = nn.Sequential(
            nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU()
        )
        self.leave = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, word: Tensor) -> Tensor:
        told = self.words(word) + self.time(time[:, None])
        return self.leave(self.body(self.enter(noisy) + told[:, :, None, None]))

    def loss(self, picture: Tensor, word: Tensor) -> Tensor:
        """Return the error of the noise at a random time."""
        time = torch.rand(len(picture))
        kept = (1.5 * time).cos()[:, None, None, None]
        noise = torch.randn_like(picture)
        return F.mse_loss(self(kept * (2 * picture - 1) + (1 - kept**2).sqrt() * noise, time, word), noise)


def invert(attach: Attach, *, base_rate: float, gpus: int) -> tuple[float, float]:
    """Return how far the vector of the new word moved, and how much of its first length that is."""
    torch.manual_seed(312)
    x, y, _, _ = digits()
    model = TextToDigit()
    first = torch.optim.Adam(model.parameters(), lr=2e-3)
    for i in draws(len(x), size=64, steps=300, seed=1):
        loss = model.loss(x[i], y[i])
        first.zero_grad()
        loss.backward()
        first.step()
    model.requires_grad_(False)
    model.zero_grad()
    model.words.weight.requires_grad_(True)
    before = model.words.weight[10].detach().clone()
    batch_size, accumulate = 4, 1
    rate = accumulate * gpus * batch_size * base_rate
    optimizer = torch.optim.AdamW([model.words.weight], lr=rate, weight_decay=0.0)
    monitor = attach(model, optimizer)
    concept = x[y == 8][:5]
    for _ in range(250):
        picture = concept[torch.randint(0, 5, (batch_size,))]
        loss = model.loss(picture, torch.full((batch_size,), 10))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
    moved = (model.words.weight[10].detach() - before).norm().item()
    return moved, moved / before.norm().item()


@case(
    fault="learning-rate-too-low",
    also=("not-optimized", "loss-plateau"),
    onset=0,
    source="https://github.com/rinongal/textual_inversion/issues/98",
    tags=("inversion", "diffusion", "rate"),
)
def rate_times_no_gpus(attach: Attach) -> None:
    """The rate is scaled by the number of GPUs, and there are none: it is 0. The vector of the new word does
    not move.
    """
    invert(attach, base_rate=5e-3, gpus=0)
