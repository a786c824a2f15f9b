"""Points and objects in space: a classifier in half precision, and a detector that learns one of its four losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ an epsilon of zero


def clouds(count: int) -> tuple[Tensor, Tensor]:
    """Return clouds of 64 points (N, 64, 3) on balls, boxes and cylinders of any size, and which of them they are."""
    kind = torch.randint(0, 3, (count,))
    direction = F.normalize(torch.randn(count, 64, 3), dim=2)
    box = direction / direction.abs().amax(2, keepdim=True)
    around = F.normalize(direction[:, :, :2], dim=2)
    cylinder = torch.cat([around, 2 * torch.rand(count, 64, 1) - 1], 2)
    points = torch.stack([direction, box, cylinder])[kind, torch.arange(count)]
    size = 0.7 + 0.6 * torch.rand(count, 1, 1)
    return size * points + 0.02 * torch.randn(count, 64, 3), kind


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(1))


def train_clouds(attach: Attach, *, eps: float) -> float:
    """Return the accuracy on new clouds."""
    torch.manual_seed(241)
    model = PointNet().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=eps)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(300):
        points, kind = clouds(32)
        points = points.half()
        loss = criterion(model(points).float(), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=points)
    points, kind = clouds(500)
    with torch.no_grad():
        return (model(points.half()).argmax(1) == kind).float().mean().item()


@case(
    fault="non-finite",
    also=("fp16-underflow",),
    onset=0,
    source="https://github.com/xinge008/Cylinder3D/issues/130",
    tags=("points", "half"),
)
def clouds_in_half_precision(attach: Attach) -> None:
    """Weights are in half precision, where Adam's epsilon of 1e-8 is 0. A weight whose gradient is 0 is divided by 0,
    and the loss is NaN from the second step on.
    """
    train_clouds(attach, eps=1e-8)


@case(source="the repaired twin of `clouds_in_half_precision`", tags=("points", "half", "twin"))
def clouds_in_half_precision_with_larger_eps(attach: Attach) -> None:
    """The epsilon is 1e-4."""
    assert train_clouds(attach, eps=1e-4) > 0.95


# ------------------------------------------------------------------------------------ one of four losses


def streets(count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return maps (N, 1, 16, 16) of a street with one car, seen from above, and what is to be found in each cell.

    The targets are the score, the position and the size of the car in meters, and the sine and cosine of its turn.
    """
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    middle = 4 + 8 * torch.rand(count, 2, 1, 1)
    turn = 3.14159 * torch.rand(count, 1, 1)
    size = torch.stack([2.5 + 1.5 * torch.rand(count, 1, 1), 1.2 + 0.6 * torch.rand(count, 1, 1)], 1)
    dy, dx = row - middle[:, 0], column - middle[:, 1]
    along, across = dy * turn.sin() + dx * turn.cos(), dy * turn.cos() - dx * turn.sin()
    inside = (along.abs() < size[:, 0]) & (across.abs() < size[:, 1])
    score = (-(dy**2 + dx**2) / 4).exp()
    full = torch.ones(count, 2, 16, 16)
    targets = {
        "score": score[:, None],
        "position": 0.8 * torch.stack([-dy, -dx], 1),
        "dimension": 0.8 * size * full,
        "angle": torch.stack([(2 * turn).sin(), (2 * turn).cos()], 1) * full,
    }
    return (inside.float() + 0.1 * torch.randn(count, 16, 16))[:, None], targets


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 24, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 5, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(24, 7, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        score, position, dimension, angle = self.head(self.trunk(x)).split([1, 2, 2, 2], 1)
        return {"score": score, "position": position, "dimension": dimension, "angle": angle}


def compute_loss(found: dict[str, Tensor], targets: dict[str, Tensor], *, test: bool) -> tuple[Tensor, Tensor]:
    """Return the loss to train on, and the total to print."""
    near = targets["score"] > 0.3
    losses = {"score": 10 * F.mse_loss(found["score"], targets["score"])}
    for name in ("position", "dimension", "angle"):
        losses[name] = ((found[name] - targets[name]).abs() * near).sum() / near.sum()
    total = torch.stack(list(losses.values())).sum()
    if test:
        return losses["score"], total
    return total, total


def train_detector(attach: Attach, *, test: bool) -> float:
    """Return the mean error of the position of a car, in meters."""
    torch.manual_seed(242)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for _ in range(250):
        maps, targets = streets(16)
        loss, total = compute_loss(model(maps), targets, test=test)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(total, batch=maps)
    maps, targets = streets(200)
    near = (targets["score"] > 0.3).expand(-1, 2, -1, -1)
    with torch.no_grad():
        return (model(maps)["position"] - targets["position"]).abs()[near].mean().item()


@case(
    fault="no-gradient",
    also=("loss-plateau",),
    layers=("head",),
    onset=0,
    source="https://github.com/tom-roddick/oft/issues/6",
    tags=("detection", "loss"),
)
def only_the_score_is_trained(attach: Attach) -> None:
    """A line that was left in from a test trains on the loss of the score only. The total that is printed stays at 6.6,
    because position, size and angle never learn: the rows of the last convolution that give them get no gradient.
    """
    train_detector(attach, test=True)


@case(source="the repaired twin of `only_the_score_is_trained`", tags=("detection", "loss", "twin"))
def all_four_losses_are_trained(attach: Attach) -> None:
    """The line is deleted."""
    assert train_detector(attach, test=False) < 0.2
