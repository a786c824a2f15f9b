"""Learning rates that are too small or too large for a while, and gradients that add up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.processes import blobs
from scripts.fault_zoo.cases.reports.material import characters, indices, windows
from scripts.fault_zoo.protocol import Attach, case


class SmallGPT(nn.Module):
    """Read the last 24 characters and say the next one."""

    def __init__(self, vocabulary: int, *, blocks: int = 2, norm_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 48)
        self.place = nn.Embedding(24, 48)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 3, 96, dropout=0.0, batch_first=True, norm_first=norm_first)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, vocabulary)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------- a rate where a factor is expected


def train_warmed_up(attach: Attach, *, repaired: bool) -> float:
    """Return the loss over the last 30 steps."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(40_000)
    rate, steps = 3e-3, 160
    model = SmallGPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def curve(step: int) -> float:
        factor = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        return factor if repaired else rate * factor

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = windows(tokens, 24, 8, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    onset=0,
    source="https://github.com/pytorch/pytorch/issues/78917",
    tags=("gpt", "text", "schedule"),
)
def schedule_returns_the_rate(attach: Attach) -> None:
    """The function of `LambdaLR` returns a learning rate, which is multiplied by the learning rate: 9e-6 in place of
    3e-3. Reported in https://github.com/pytorch/pytorch/issues/78917.
    """
    train_warmed_up(attach, repaired=False)


@case(
    source="the repaired twin of `schedule_returns_the_rate`: the function returns a factor",
    tags=("gpt", "text", "schedule"),
)
def schedule_returns_a_factor(attach: Attach) -> None:
    """A small GPT with warm-up and a cosine to zero."""
    assert train_warmed_up(attach, repaired=True) < 3.1


# -------------------------------------------------------------------------------------------- no warm-up after a norm


def train_post_norm(attach: Attach, *, repaired: bool) -> float:
    """Return the loss over the last 30 steps."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(40_000)
    model = SmallGPT(vocabulary, blocks=6, norm_first=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 if repaired else 2e-2)
    warm_up = 80 if repaired else 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, 1.0))
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(200):
        x, y = windows(tokens, 24, 8, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


@case(
    fault="learning-rate-too-high",
    onset=0,
    tolerate=("loss-plateau", "vanishing-gradient", "dead-layer"),
    source="https://github.com/pytorch/pytorch/issues/55270",
    tags=("gpt", "text", "schedule"),
)
def post_norm_without_warm_up(attach: Attach) -> None:
    """Six blocks with the normalization behind the sum, at a learning rate of 0.02 from the first step on. The model
    gets stuck at the frequencies of the characters. Reported in https://github.com/pytorch/pytorch/issues/55270.
    """
    train_post_norm(attach, repaired=False)


@case(
    source="the repaired twin of `post_norm_without_warm_up`: the rate rises for 80 steps to 0.002",
    tags=("gpt", "text", "schedule"),
)
def post_norm_with_warm_up(attach: Attach) -> None:
    """Six blocks with the normalization behind the sum; the rate rises slowly."""
    assert train_post_norm(attach, repaired=True) < 2.85


# --------------------------------------------------------------------------------------------- gradients never zeroed


def train_boxes(attach: Attach, *, repaired: bool) -> float:
    """Return the mean distance of the corners of new boxes, as a fraction of the width of an image."""
    torch.manual_seed(0)
    x, boxes = boxed(600, seed=4)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(432, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.l1_loss)
    chosen = indices(len(x), 16)
    for _ in range(300):
        i = next(chosen)
        loss = F.l1_loss(model(x[i]), boxes[i])
        if repaired:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x, boxes = boxed(200, seed=9)
    with torch.no_grad():
        return F.l1_loss(model(x), boxes).item()


def boxed(images: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return images with two ellipses and the box around both: left, right, top and bottom, in 0..1."""
    x, mask = blobs(images, seed=seed)
    boxes = []
    for axis in (3, 2):
        used = mask.amax(axis).squeeze(1)
        size = used.shape[1]
        boxes += [used.argmax(1) / size, 1 - used.flip(1).argmax(1) / size]
    return x, torch.stack(boxes, 1)


@case(
    fault="missing-zero-grad",
    onset=1,
    tolerate=("loss-plateau", "oscillating-gradient"),
    source="https://github.com/IDEA-Research/DN-DETR/issues/19",
    tags=("detection", "conv"),
)
def boxes_without_zero_grad(attach: Attach) -> None:
    """A detector of boxes is trained and `zero_grad` is never called. Reported in
    https://github.com/IDEA-Research/DN-DETR/issues/19.
    """
    train_boxes(attach, repaired=False)


@case(source="the repaired twin of `boxes_without_zero_grad`: it is called", tags=("detection", "conv"))
def boxes_with_zero_grad(attach: Attach) -> None:
    """A small network finds the box around two shapes."""
    assert train_boxes(attach, repaired=True) < 0.1
