"""Vectors of pictures: a contrast without unit length, and triplets that are apart from the start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case


def view(picture: Tensor) -> Tensor:
    """Return the pictures, shifted by up to one pixel, brighter or darker, and noisy."""
    shift = torch.randint(-1, 2, (2,)).tolist()
    contrast = 0.6 + 0.8 * torch.rand(len(picture), 1, 1, 1)
    return picture.roll(shift, (2, 3)) * contrast + 0.1 * torch.randn_like(picture)


def nearest_neighbor_accuracy(encoder: nn.Module) -> float:
    """Return how often the nearest training picture has the label of a picture for testing."""
    x, y, x_test, y_test = digits()
    encoder.eval()
    with torch.no_grad():
        known, new = F.normalize(encoder(x), dim=1), F.normalize(encoder(x_test), dim=1)
    return (y[(new @ known.T).argmax(1)] == y_test).float().mean().item()


# ------------------------------------------------------------------------------------ vectors of any length


class ViewEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(256, 128, bias=False),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 32, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.features(x))


class SupervisedContrast(nn.Module):
    """The loss of Khosla et al. (2020) for features (batch, views, size)."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        contrast = torch.cat(features.unbind(1))
        logits = contrast @ contrast.T / 0.07
        logits = logits - logits.max(1, keepdim=True).values.detach()
        others = 1 - torch.eye(len(contrast))
        same = (labels[:, None] == labels).float().repeat(features.shape[1], features.shape[1]) * others
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        return -((same * log_prob).sum(1) / same.sum(1)).mean()


def train_supervised_contrast(attach: Attach, *, normalized: bool) -> float:
    """Return the accuracy of the nearest neighbor."""
    torch.manual_seed(202)
    x, y, _, _ = digits()
    model = ViewEncoder()
    criterion = SupervisedContrast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=200):
        features = torch.stack([model(view(x[i])), model(view(x[i]))], 1)
        if normalized:
            features = F.normalize(features, dim=2)
        loss = criterion(features, y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return nearest_neighbor_accuracy(model)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=0,
    source="https://github.com/HobbitLong/SupContrast/issues/50",
    tags=("contrastive",),
)
def contrast_without_unit_length(attach: Attach) -> None:
    """The features go into the supervised contrastive loss without `F.normalize`. Each vector is far more similar to
    itself than to the others, whose exponentials are all 0: the logarithm of 0 makes the first loss NaN.
    """
    train_supervised_contrast(attach, normalized=False)


# ------------------------------------------------------------------------------------ nothing left to push apart


@case(source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/268", tags=("metric", "finetune", "odd"))
def triplets_that_are_apart(attach: Attach) -> None:
    """An encoder that was trained to tell digits apart is tuned with the hardest triplet of each anchor. The loss is 0
    in most steps, and the answer was that this is normal: all triplets already keep the margin.
    """
    torch.manual_seed(203)
    x, y, _, _ = digits()
    model = ViewEncoder()
    centers = nn.Linear(32, 10, bias=False)
    first = torch.optim.Adam([*model.parameters(), *centers.parameters()], lr=2e-3)
    for i in draws(len(x), size=64, steps=250, seed=1):
        loss = F.cross_entropy(16 * F.linear(F.normalize(model(x[i])), F.normalize(centers.weight)), y[i])
        first.zero_grad()
        loss.backward()
        first.step()
    before = nearest_neighbor_accuracy(model)
    model.train()
    criterion = nn.TripletMarginLoss(margin=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=250):
        z = F.normalize(model(x[i]))
        distance = torch.cdist(z, z).detach()
        same = y[i][:, None] == y[i]
        positive = z[distance.masked_fill(~same, -1.0).argmax(1)]
        negative = z[distance.masked_fill(same, 9.0).argmin(1)]
        loss = criterion(z, positive, negative)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    after = nearest_neighbor_accuracy(model)
    assert after > max(0.95, before - 0.01), after
