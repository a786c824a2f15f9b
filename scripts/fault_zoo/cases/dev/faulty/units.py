"""What single units do: silent, dying, saturated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, big_digits, setup, shapes, tokens
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------- rising-sparsity


class SparseAutoencoder(nn.Module):
    def __init__(self, dim: int, latents: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))
        self.encoder = nn.Linear(dim, latents)
        self.decoder = nn.Linear(latents, dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.relu(self.encoder(x - self.bias))
        return self.decoder(codes) + self.bias, codes


@case(
    fault="rising-sparsity",
    layers=("encoder", "decoder"),
    onset=50,
    also=("dead-relu",),
    tolerate=("dead-layer",),
    source="Bricken et al. 2023 ('Towards Monosemanticity') and Gao et al. 2024 on dead latents of sparse autoencoders",
)
def activation_dictionary(attach: Attach) -> None:
    """A sparse autoencoder with an L1 penalty too strong and no resampling: its latents die one after another."""
    setup(10)
    atoms = F.normalize(torch.randn(160, 48), dim=1)
    model = SparseAutoencoder(48, 384)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for _step in range(500):
        active = (torch.rand(256, 160) < 0.03).float() * torch.rand(256, 160) * 2
        x = active @ atoms + 0.02 * torch.randn(256, 48)
        rebuilt, codes = model(x)
        loss = ((rebuilt - x) ** 2).sum(1).mean() + 1.2 * codes.sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


# ------------------------------------------------------------------------------------------------------- dead-relu


class PointDetector(nn.Module):
    """A heat map of object centres: two convolutions, a tower of three, one prediction layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.tower = nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())])
        self.score = nn.Conv2d(width, 1, 1)
        prior = 0.01
        for m in [*list(self.tower), self.score]:
            if isinstance(m, nn.Conv2d):
                nn.init.normal_(m.weight, std=0.03)
                if m.bias is not None:
                    nn.init.constant_(m.bias, -math.log((1 - prior) / prior))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.tower(self.backbone(x)))


@case(
    fault="dead-relu",
    layers=("tower", "backbone"),
    onset=0,
    also=("dead-layer", "poor-initialization", "no-gradient"),
    tolerate=("loss-plateau", "vanishing-gradient"),
    source=(
        "Lin et al. 2017 (focal loss), sec. 4.1: the prior bias is for the last layer only; here the init loop gives "
        "it to the tower as well"
    ),
)
def heatmap_detector(attach: Attach) -> None:
    """The detector's prior bias of -4.6 is set in every layer of the head's tower, whose ReLUs then never fire."""
    setup(11)
    x, m = shapes(512, 16)
    model = PointDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, masks in batches(x, m, size=16, steps=160):
        loss = criterion(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


# -------------------------------------------------------------------------------------------- saturated-activation


@case(
    fault="saturated-activation",
    layers=("1", "2"),
    onset=0,
    tolerate=("poor-initialization", "vanishing-gradient", "loss-plateau", "dead-layer", "layer-imbalance"),
    source=(
        "StackOverflow 55328966 and 39525358 (DeepFD benchmark, 'missing preprocessing'): raw pixels into sigmoid "
        "layers"
    ),
)
def raw_pixels_mlp(attach: Attach) -> None:
    """Pixel values 0..255 go into a sigmoid layer without any scaling."""
    setup(12)
    x, y = big_digits(16)
    x = (x * 255).round()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 200), nn.Sigmoid(), nn.Linear(200, 80), nn.Sigmoid(), nn.Linear(80, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=100, steps=300):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class DotAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.weights = nn.Softmax(dim=-1)
        for m in (self.query, self.key):
            nn.init.xavier_normal_(m.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(x) + x, self.weights(self.query(x) @ self.key(x).transpose(1, 2))


class TopicAttention(nn.Module):
    def __init__(self, vocab: int, classes: int, dim: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = DotAttention(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        v, w = self.attention(self.embed(ids))
        return self.classify((w @ v).mean(1))


@case(
    fault="saturated-activation",
    layers=("attention.weights", "attention.query", "attention.key"),
    onset=0,
    also=("poor-initialization",),
    tolerate=("layer-imbalance", "vanishing-gradient", "dead-layer"),
    source="Vaswani et al. 2017, sec. 3.2.1: without 1/sqrt(d) the softmax is pushed into regions of tiny gradient",
)
def topic_attention(attach: Attach) -> None:
    """Dot-product attention over 256 dimensions without the division by sqrt(d), on N(0, 1) embeddings: the softmax is
    one-hot from the start.
    """
    setup(125)
    ids, _lengths, y = tokens(4000, 20)
    model = TopicAttention(60, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=32, steps=200):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)
