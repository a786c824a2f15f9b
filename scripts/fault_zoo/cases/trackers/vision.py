"""Pictures: boxes, digits and small lesions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------------------- boxes


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of one bright rectangle, (N, 1, 16, 16), and its corners x1, y1, x2, y2 in pixels."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 9, (count, 2), generator=generator)
    last = first + torch.randint(3, 8, (count, 2), generator=generator)
    spot = torch.arange(16)
    inside = (spot >= first[:, :, None]) & (spot < last[:, :, None])
    pictures = (inside[:, 1, :, None] & inside[:, 0, None, :]).float()
    pictures = pictures + 0.3 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], torch.cat([first, last], 1).float()


def offsets(boxes: Tensor) -> Tensor:
    """Return center and logarithmic size relative to an anchor of 6 pixels in the middle, as detectors do."""
    size = boxes[:, 2:] - boxes[:, :2]
    center = boxes[:, :2] + size / 2
    return torch.cat([(center - 8) / 6, torch.log(size / 6)], 1)


class BoxNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.box = nn.Sequential(nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.box(self.trunk(x))


def train_boxes(attach: Attach, *, repaired: bool) -> float:
    """Return the mean error on new pictures, in units of the anchor."""
    torch.manual_seed(21)
    pictures, boxes = scenes(1200, seed=1)
    boxes[700] = boxes[700, [2, 3, 0, 1]]  # one annotator dragged from the lower right
    if repaired:
        boxes = torch.cat([torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])], 1)
    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.smooth_l1_loss)
    for i in draws(1200, size=8, steps=300, seed=3):
        loss = F.smooth_l1_loss(model(pictures[i]), offsets(boxes[i]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures[i])
    pictures, boxes = scenes(300, seed=2)
    with torch.no_grad():
        return (model(pictures) - offsets(boxes)).abs().mean().item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=90,
    source="https://github.com/pytorch/vision/issues/2240",
    tags=("detection", "data"),
)
def box_with_swapped_corners(attach: Attach) -> None:
    """The corners of one box of 1200 are swapped. Its width is negative, the logarithm of the width is NaN, and the
    first batch with it ruins the weights. That most reports of a loss of NaN in detection are due to such boxes is said
    in https://github.com/pytorch/vision/issues/2240; see https://github.com/pytorch/vision/issues/1120,
    https://github.com/pytorch/vision/issues/2235 and https://github.com/jwyang/faster-rcnn.pytorch/issues/349.
    """
    train_boxes(attach, repaired=False)


@case(source="the repaired twin of `box_with_swapped_corners`: corners are sorted", tags=("detection", "twin"))
def box_with_sorted_corners(attach: Attach) -> None:
    """The corners are sorted when the boxes are read."""
    assert train_boxes(attach, repaired=True) < 0.15


# ---------------------------------------------------------------------------------------- the same answer for all


def convolutions(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_rate(attach: Attach, *, rate: float) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(22)
    x, y, _, _ = digits()
    x = 255 * x
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=64, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="dead-relu",
    also=("learning-rate-too-high", "loss-plateau", "dead-layer"),
    tolerate=("gradient-spike", "rising-sparsity", "no-gradient", "exploding-gradient", "vanishing-gradient"),
    onset=5,
    source="https://github.com/keras-team/keras/issues/3752",
    tags=("rate",),
)
def same_digit_for_every_picture(attach: Attach) -> None:
    """A rate of 0.05 with momentum on pixels from 0 to 255: after a few huge steps no unit of the hidden layers fires
    any more, only the last biases learn, and every picture is the same digit. Reported in
    https://github.com/keras-team/keras/issues/3752, https://github.com/TrustworthyComputing/REDsec/issues/3 and
    https://github.com/MichalDanielDobrzanski/DeepLearningPython/issues/13.
    """
    train_rate(attach, rate=0.05)


# ------------------------------------------------------------------------------- another transform for the validation


def train_transformed(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy of the last validation."""
    torch.manual_seed(23)
    x, y, test_x, test_y = digits()
    pixels, test_pixels = 255 * x, 255 * test_x
    mean, std = pixels.mean(), pixels.std()
    pixels = (pixels - mean) / std
    if repaired:
        test_pixels = (test_pixels - mean) / std
    model = convolutions()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    accuracy = 0.0
    for step, i in enumerate(draws(len(x), size=64, steps=240)):
        model.train()
        loss = criterion(model(pixels[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 != 19:
            monitor.step(loss, batch=pixels[i])
            continue
        model.eval()
        with torch.no_grad():
            logits = model(test_pixels)
        accuracy = (logits.argmax(1) == test_y).float().mean().item()
        monitor.step(loss, batch=pixels[i], val_loss=criterion(logits, test_y))
    return accuracy


@case(
    fault="train-eval-mismatch",
    also=("overfitting",),
    onset=19,
    source="https://github.com/JeasunLok/ResNet-pytorch/issues/1",
    tags=("data", "validation"),
)
def validation_pictures_not_normalized(attach: Attach) -> None:
    """The training pictures are normalized and the validation pictures are not, so that the validation loss is hundreds
    of times the training loss. Reported in https://github.com/JeasunLok/ResNet-pytorch/issues/1,
    https://github.com/keras-team/keras/issues/12689 and https://github.com/leeyeehoo/CSRNet-pytorch/issues/25.
    """
    train_transformed(attach, repaired=False)


@case(source="the repaired twin of `validation_pictures_not_normalized`", tags=("data", "validation", "twin"))
def validation_pictures_normalized_too(attach: Attach) -> None:
    """The validation pictures are normalized in the same way."""
    assert train_transformed(attach, repaired=True) > 0.93


# ------------------------------------------------------------------------------------------------------- empty masks


def lesions(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures with one lesion of 2 x 2 pixels, (N, 1, 16, 16), and masks."""
    generator = torch.Generator().manual_seed(seed)
    spot = torch.randint(1, 14, (count, 2), generator=generator)
    line = torch.arange(16)
    inside = (line >= spot[:, :, None]) & (line < spot[:, :, None] + 2)
    masks = (inside[:, 0, :, None] & inside[:, 1, None, :]).float()
    pictures = 0.8 * masks + 0.7 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], masks[:, None]


def train_lesions(attach: Attach, *, weight: float) -> float:
    """Return how many pixels of the lesions in new pictures are found, from 0 to 1."""
    torch.manual_seed(24)
    pictures, masks = lesions(800, seed=1)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 1, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weight))
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(800, size=16, steps=250):
        loss = criterion(model(pictures[i]), masks[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures[i])
    pictures, masks = lesions(200, seed=2)
    with torch.no_grad():
        return (((model(pictures) > 0) & (masks > 0)).sum() / masks.sum()).item()


@case(
    fault="loss-plateau",
    onset=20,
    source="https://github.com/jocicmarko/ultrasound-nerve-segmentation/issues/75",
    tags=("segmentation", "imbalance"),
)
def masks_that_stay_empty(attach: Attach) -> None:
    """Four of 256 pixels are lesion and all pixels have the same weight: the network learns that everything is
    background, and the loss stays at the entropy of the classes. Reported in
    https://github.com/jocicmarko/ultrasound-nerve-segmentation/issues/75, https://github.com/NifTK/NiftyNet/issues/208
    and https://github.com/GeorgeSeif/Semantic-Segmentation-Suite/issues/89. No kind names imbalanced classes; that the
    loss falls no further comes nearest.
    """
    train_lesions(attach, weight=1.0)
