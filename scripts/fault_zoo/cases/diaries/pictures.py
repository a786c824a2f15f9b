"""Pictures: photographs of dark ink, masks with grey edges, a rate that starts anew, and a norm of two pictures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ photographs of dark ink


def train_reader(attach: Attach, *, inverts: bool) -> float:
    """Return the accuracy on photographs."""
    torch.manual_seed(701)
    x, y, x_test, y_test = digits()
    photographs = 1 - x_test
    if inverts:
        photographs = 1 - photographs
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=250)):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 25 == 24:
            with torch.no_grad():
                val_loss = criterion(model(photographs), y_test).item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    with torch.no_grad():
        return (model(photographs).argmax(1) == y_test).float().mean().item()


@case(
    fault="train-eval-mismatch",
    also=("overfitting",),
    onset=24,
    source="https://example-a.com/answer/78029738",
    tags=("cnn", "data"),
)
def photographs_of_dark_ink(attach: Attach) -> None:
    """Digits for training are bright on a dark ground, and photographs of one's own are dark on a bright ground. The
    training loss falls to 0.15, and no photograph is read.
    """
    train_reader(attach, inverts=False)


@case(source="the repaired twin of `photographs_of_dark_ink`", tags=("cnn", "data", "twin"))
def photographs_inverted(attach: Attach) -> None:
    """Photographs are inverted first, and more than 95 % are read."""
    assert train_reader(attach, inverts=True) > 0.95


# ------------------------------------------------------------------------------------ masks with grey edges


class Segmenter(nn.Module):
    """A network of convolutions with a coarse and a fine path."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.coarse = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.out(torch.cat([fine, self.up(self.coarse(fine))], 1))


def turned(pictures: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pictures and masks by the same random angles, with linear interpolation."""
    angle = 2 * math.pi * torch.rand(len(pictures))
    zero = torch.zeros_like(angle)
    rows = [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(pictures.shape), align_corners=False)
    both = F.grid_sample(torch.cat([pictures, masks], 1), grid, align_corners=False)
    return both[:, :1], both[:, 1:].round()


@case(
    fault="train-eval-mismatch",
    also=("loss-plateau", "overfitting"),
    onset=24,
    source="https://github.com/datvuthanh/HybridNets/issues/54",
    tags=("segmentation", "augmentation"),
)
def masks_with_grey_edges(attach: Attach) -> None:
    """Pictures and their masks of 0 and 255 are turned with linear interpolation. The edge of each cell becomes grey,
    and only 255 counts as inside, so that the network learns cells that are too small.
    """
    torch.manual_seed(702)
    x, masks = cells(600, seed=31)
    x_test, masks_test = cells(120, seed=32)
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=16, steps=250)):
        pictures, grey = turned(x[i], 255 * masks[i])
        loss = criterion(model(pictures), (grey == 255).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 25 == 24:
            with torch.no_grad():
                val_loss = criterion(model(x_test), masks_test).item()
        monitor.step(loss, batch=pictures, val_loss=val_loss)


# ------------------------------------------------------------------------------------ a rate that starts anew


def spots(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (N, 1, 16, 16) with one bright box, and its center, width and height as shares of the picture."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(3, 8, (count, 2), generator=generator)
    corner = (torch.rand(count, 2, generator=generator) * (16 - size)).long()
    place = torch.arange(16)
    inside = (place >= corner[:, :, None]) & (place < (corner + size)[:, :, None])
    pictures = (inside[:, 0, :, None] & inside[:, 1, None, :]).float()
    pictures += 0.2 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], torch.cat([corner + size / 2, size.float()], 1) / 16


def finder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )


@case(
    fault="learning-rate-too-high",
    also=("gradient-spike", "oscillating-gradient"),
    tolerate=("rising-sparsity",),
    onset=0,
    source="https://github.com/ultralytics/yolov5/issues/292",
    tags=("detection", "resume", "rate"),
)
def rate_that_starts_anew(attach: Attach) -> None:
    """A detector is resumed at epoch 9 of 12, where the rate has fallen to a fifth. The new schedule sets the rate of
    its first epoch, 0.2, when it is made, and only later learns which epoch it is. The loss is three times as high
    until the epoch ends.
    """
    torch.manual_seed(703)
    x, boxes = spots(960, seed=1)

    def share(epoch: int) -> float:
        return (1 + math.cos(epoch * math.pi / 12)) / 2 * 0.9 + 0.1

    before = finder()
    optimizer = torch.optim.SGD(before.parameters(), lr=0.2, momentum=0.937, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step, i in enumerate(draws(len(x), size=32, steps=270)):
        optimizer.zero_grad()
        F.l1_loss(before(x[i]), boxes[i]).backward()
        optimizer.step()
        if step % 30 == 29:
            schedule.step()
    checkpoint: dict[str, Any] = {"model": before.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 8}

    model = finder()
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.937, nesterov=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    start_epoch = checkpoint["epoch"] + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    schedule.last_epoch = start_epoch - 1
    criterion = nn.L1Loss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=150, seed=1)):
        loss = criterion(model(x[i]), boxes[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        if step % 30 == 29:
            schedule.step()


# ------------------------------------------------------------------------------------ a norm of two pictures


def train_on_cards(attach: Attach, *, cards: int) -> float:
    """Return the accuracy on new pictures. Each card normalizes its own part of the batch."""
    torch.manual_seed(704)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=250)):
        model.train()
        loss = criterion(torch.cat([model(part) for part in x[i].chunk(cards)]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(x_test), y_test).item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="train-eval-mismatch",
    also=("overfitting", "oscillating-gradient"),
    onset=24,
    source="https://githubissues.com/fastnlp/fastNLP/434",
    tags=("cnn", "batch-norm", "parallel"),
)
def norm_of_two_pictures(attach: Attach) -> None:
    """A batch of 32 pictures is spread over 16 cards, and each of them normalizes its own two pictures. The statistics
    differ from card to card, and none of them is like those that the evaluation uses.
    """
    train_on_cards(attach, cards=16)


@case(source="the repaired twin of `norm_of_two_pictures`", tags=("cnn", "batch-norm", "parallel", "twin"))
def norm_of_the_whole_batch(attach: Attach) -> None:
    """The statistics are those of the batch on all cards, and more than 97 % of new digits are right."""
    assert train_on_cards(attach, cards=1) > 0.97
