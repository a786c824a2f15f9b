"""Pictures: a rate that is too high, weights that are all alike, logits behind a ReLU, and a logarithm in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a rate that is too high


def lenet() -> nn.Sequential:
    """Return the network of LeCun et al. 1998 with ReLU, for 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def train_lenet(attach: Attach, *, lr: float) -> float:
    """Return the accuracy on new digits."""
    torch.manual_seed(601)
    x, y, x_test, y_test = digits()
    model = lenet()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="learning-rate-too-high",
    also=("dead-relu", "rising-sparsity", "dead-layer", "loss-plateau"),
    tolerate=("vanishing-gradient", "exploding-gradient", "no-gradient"),
    onset=0,
    source="https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814",
    tags=("cnn", "rate"),
)
def lenet_at_a_large_rate(attach: Attach) -> None:
    """Adam trains LeNet at a rate of 0.05. After a few steps all units of a layer are silent, and the loss stays at
    log 10 = 2.30. One digit is said for every picture.
    """
    train_lenet(attach, lr=0.05)


@case(source="the repaired twin of `lenet_at_a_large_rate`", tags=("cnn", "rate", "twin"))
def lenet_at_a_small_rate(attach: Attach) -> None:
    """At a rate of 0.004, more than 90 % of new digits are right."""
    assert train_lenet(attach, lr=0.004) > 0.9


# ------------------------------------------------------------------------------------ weights that are all alike


@case(
    fault="poor-initialization",
    also=("loss-plateau",),
    onset=0,
    source="https://pages.dogdog.run/machine_learning/weight_initialization.html",
    tags=("mlp", "initialization"),
)
def weights_all_alike(attach: Attach) -> None:
    """All weights start at 0.02. The units of a layer get the same gradient and stay the same, so that each layer
    acts as one unit. A quarter of new digits is right; with the default of PyTorch it is nine of ten.
    """
    torch.manual_seed(602)
    x, y, _, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=300):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


# ------------------------------------------------------------------------------------ logits behind a ReLU


class Outliner(nn.Module):
    """A small U-Net. Its last layer may end in a ReLU."""

    def __init__(self, *, ends_in_relu: bool) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(32, 1, 3, padding=1), nn.ReLU() if ends_in_relu else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        return self.out(torch.cat([high, self.up(self.middle(self.down2(high)))], 1))


def dice(logits: Tensor, masks: Tensor) -> float:
    """Return the overlap of the pixels that are said to be inside with those that are."""
    said = (logits > 0).float()
    return (2 * (said * masks).sum() / (said.sum() + masks.sum() + 1e-6)).item()


def train_outliner(attach: Attach, *, ends_in_relu: bool) -> float:
    """Return the overlap on new pictures."""
    torch.manual_seed(603)
    x, masks = cells(600, seed=21)
    model = Outliner(ends_in_relu=ends_in_relu)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=16, steps=200):
        loss = criterion(model(x[i]), masks[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    x_test, masks_test = cells(100, seed=22)
    with torch.no_grad():
        return dice(model(x_test), masks_test)


@case(
    fault="loss-plateau",
    also=("probabilities-into-loss", "dead-relu", "rising-sparsity", "dead-layer", "no-gradient"),
    tolerate=("vanishing-gradient", "poor-initialization"),
    layers=("out",),
    onset=0,
    source="http://www.dtcms.com/a/394596.html",
    tags=("segmentation", "loss"),
)
def outline_behind_a_relu(attach: Attach) -> None:
    """A network that outlines cells ends in a ReLU, and the loss takes its output for logits. A logit of at least 0
    means a probability of at least 0.5, so that the loss cannot fall far below log 2 = 0.69.
    """
    train_outliner(attach, ends_in_relu=True)


@case(source="the repaired twin of `outline_behind_a_relu`", tags=("segmentation", "loss", "twin"))
def outline_of_any_sign(attach: Attach) -> None:
    """Without the ReLU, the overlap on new pictures is more than 0.8."""
    assert train_outliner(attach, ends_in_relu=False) > 0.8


# ------------------------------------------------------------------------------------ a logarithm in bfloat16


def train_in_half_precision(attach: Attach, *, loss_in_half: bool) -> float:
    """Return the overlap on new pictures. The focal loss (Lin et al. 2017) is computed from probabilities."""
    torch.manual_seed(604)
    x, masks = cells(600, seed=21)
    model = Outliner(ends_in_relu=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=16, steps=200):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x[i])
            if not loss_in_half:
                logits = logits.float()
            p = torch.sigmoid(logits)
            y = masks[i].to(p.dtype)
            per_pixel = -y * (1 - p) ** 2 * torch.log(p) - (1 - y) * p**2 * torch.log(1 - p)
            loss = 4 * per_pixel.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    x_test, masks_test = cells(100, seed=22)
    with torch.no_grad():
        return dice(model(x_test), masks_test)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=18,
    source="https://github.com/pytorch/pytorch/issues/40497",
    tags=("segmentation", "bf16", "loss"),
)
def focal_loss_in_half_precision(attach: Attach) -> None:
    """A focal loss takes logarithms of probabilities in bfloat16, where a probability above 0.998 is 1. The logarithm
    of 0 gives NaN as soon as the network is sure of one pixel, and all weights are NaN from then on.
    """
    train_in_half_precision(attach, loss_in_half=True)


@case(source="the repaired twin of `focal_loss_in_half_precision`", tags=("segmentation", "bf16", "loss", "twin"))
def focal_loss_in_single_precision(attach: Attach) -> None:
    """The loss is computed in float32, and the overlap on new pictures is more than 0.8."""
    assert train_in_half_precision(attach, loss_in_half=False) > 0.8
