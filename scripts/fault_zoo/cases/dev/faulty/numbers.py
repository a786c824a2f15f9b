"""What floating point does: NaN and Inf, half precision, loss scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, big_digits, digits, setup, standardize, table, tokens
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------------ non-finite


@case(
    fault="non-finite",
    onset=221,
    tolerate=("gradient-spike", "saturated-activation", "exploding-gradient"),
    tags=("mid-run",),
    source="StackOverflow 33712178 ('Tensorflow NaN bug?': a cross entropy written out with log(0)), ported",
)
def tumour_log_likelihood(attach: Attach) -> None:
    """The likelihood is written with log(p) and log(1 - p); once a sigmoid rounds to exactly 1, 0 * log 0 is NaN."""
    setup(30)
    x, y = table("breast_cancer")
    x, y = standardize(x), y.float()
    model = nn.Sequential(
        nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1), nn.Sigmoid()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.012, momentum=0.9)
    monitor = attach(model, optimizer)
    for xb, yb in batches(x, y, size=64, steps=300):
        optimizer.zero_grad()
        p = model(xb).squeeze(1)
        loss = -(yb * torch.log(p) + (1 - yb) * torch.log(1 - p)).mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


@case(
    fault="non-finite",
    onset=0,
    tolerate=("exploding-gradient", "gradient-spike"),
    source=(
        "own construction: scikit-learn's digits have three pixels that are always 0, so (x - mean) / std is 0 / 0 "
        "there"
    ),
)
def digits_standardized(attach: Attach) -> None:
    """Every column is divided by its standard deviation, and three border pixels have none."""
    setup(31)
    x, y = digits()
    x = x.flatten(1)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=128, steps=120):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class Lifetime(nn.Module):
    """Softplus by hand, so that small rates keep their digits."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU())
        self.rate = nn.Linear(96, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.rate(self.trunk(x)).squeeze(1)
        return torch.where(z > 20, z, torch.log1p(torch.exp(z)))


@case(
    fault="non-finite",
    onset=96,
    layers=("rate", "trunk"),
    tolerate=("gradient-spike", "exploding-gradient"),
    tags=("mid-run",),
    source="pytorch/pytorch#68425, #187297, #18287: torch.where lets the NaN gradient of the branch not taken through",
)
def count_rates(attach: Attach) -> None:
    """torch.where picks z for large z, but the gradient of the exp() branch it does not pick is still inf * 0."""
    setup(32)
    x = torch.randn(6000, 10)
    mean = 4 + 3 * x[:, 0] + 2 * x[:, 1] ** 2 + x[:, 2]
    y = torch.poisson(mean.clamp(min=0.2))
    fleet = torch.rand(6000) < 0.03  # company cars
    y[fleet] = torch.poisson(150 + 40 * torch.rand(int(fleet.sum())))
    x[fleet, 3] = 6
    model = Lifetime(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = attach(model, optimizer)
    for xb, yb in batches(x, y, size=128, steps=400):
        rate = model(xb) + 1e-4
        loss = (rate - yb * torch.log(rate)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class PaddedEncoder(nn.Module):
    def __init__(self, vocab: Any, classes: Any, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill((ids == 0)[:, None, :], float("-inf")).softmax(-1)
        return self.classify(self.norm(x + weights @ v).mean(1))


@case(
    fault="non-finite",
    onset=61,
    tolerate=("exploding-gradient", "gradient-spike"),
    tags=("mid-run",),
    source=(
        "huggingface/transformers#17306, #17437, tracel-ai/burn#4697, apex#93: softmax over a row that is masked "
        "entirely"
    ),
)
def topics_empty_document(attach: Attach) -> None:
    """One document of three thousand is empty; all its keys are masked with -inf and the softmax of its rows is NaN."""
    setup(154)
    ids, _lengths, y = tokens(3000, 20)
    ids[1234] = 0
    model = PaddedEncoder(60, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=16, steps=187, seed=3):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# -------------------------------------------------------------------------------------------------- fp16-underflow


class FrameAutoencoder(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.code = nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 16, 16))
        self.expand = nn.Linear(16, 2 * width * 16)
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.expand(self.code(self.down(x))))
        return self.up(h.view(len(x), 2 * self.width, 4, 4))


@case(
    fault="fp16-underflow",
    layers=("down", "code", "expand"),
    onset=0,
    tolerate=(
        "vanishing-gradient",
        "dead-layer",
        "rising-sparsity",
        "no-gradient",
        "loss-plateau",
        "learning-rate-too-low",
    ),
    source="engichang1467/Open-Rig3R#35: autocast to fp16 with no GradScaler; Micikevicius et al. 2018, fig. 3",
)
def frames_autoencoder_amp(attach: Attach) -> None:
    """Autocast to float16 without a GradScaler, on a reconstruction error averaged over pixels and weighted by 1e-3:
    most gradients flush to zero.
    """
    setup(33)
    x, _ = big_digits(16)
    model = FrameAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    weight = 1e-3  # the other terms of the loss come later
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for (frames,) in batches(x, size=16, steps=100):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = weight * F.mse_loss(model(frames), frames)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=frames)


# --------------------------------------------------------------------------------------------- loss-scale-collapse


class TopicReader(nn.Module):
    def __init__(self, vocab: Any, classes: Any, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids: Any) -> Any:
        pad = ids == 0
        x = self.embed(ids)
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(1, 2) / k.shape[-1] ** 0.5
        scores = scores + torch.zeros_like(scores).masked_fill(pad[:, None, :] | pad[:, :, None], float("-inf"))
        x = scores.softmax(-1) @ v
        return self.classify(x.masked_fill(pad[:, :, None], 0).sum(1) / (~pad).sum(1, keepdim=True))


@case(
    fault="loss-scale-collapse",
    onset=3,
    also=("non-finite",),
    tolerate=("not-optimized", "loss-plateau"),
    source=(
        "huggingface/transformers#17306/#17437 (-inf masks and fp16 NaN), NVIDIA/apex#318 (the loss scale falls to "
        "1e-206)"
    ),
)
def topic_reader_amp(attach: Attach) -> None:
    """Rows of padding are masked as well, so their softmax is NaN in every batch; the GradScaler skips every update."""
    setup(34)
    ids, _lengths, y = tokens(3000, 20)
    model = TopicReader(60, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=32, steps=120):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=xb)
