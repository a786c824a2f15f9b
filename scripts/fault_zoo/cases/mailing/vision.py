"""Pictures: masks, stored data sets, folders of classes, and two recipes of regularization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scripts.fault_zoo.cases.mailing.material import cells, digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


class Segmenter(nn.Module):
    """Give each pixel a logit."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.entry = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.wide = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.exit = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.entry(x))
        x = torch.relu(self.middle(x))
        return self.exit(torch.relu(self.wide(x)))


def overlap(model: nn.Module) -> float:
    """Return the intersection over union on new pictures."""
    pictures, masks = cells(200, seed=99)
    with torch.no_grad():
        found, wanted = model(pictures) > 0, masks > 0
    return ((found & wanted).sum() / (found | wanted).sum()).item()


# ------------------------------------------------------------------------------------------- masks from a PNG file


def train_masks(attach: Attach, *, repaired: bool) -> float:
    """Return the intersection over union on new pictures."""
    torch.manual_seed(101)
    pictures, masks = cells(400, seed=1)
    stored = (masks * 255).to(torch.uint8)  # as an editor saves them
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(400, size=16, steps=200):
        target = stored[i].float()
        if repaired:
            target = target / 255
        loss = criterion(model(pictures[i]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures[i])
    return overlap(model)


@case(
    fault="exploding-gradient",
    tolerate=("learning-rate-too-high", "layer-imbalance", "oscillating-gradient", "gradient-spike", "dead-relu"),
    onset=0,
    source="https://github.com/milesial/Pytorch-UNet/issues/78",
    tags=("segmentation",),
)
def masks_of_zero_and_255(attach: Attach) -> None:
    """The masks are 0 and 255, and the binary cross-entropy expects 0 and 1: the loss is negative and falls without
    end. Reported in https://github.com/milesial/Pytorch-UNet/issues/78 and
    https://github.com/MontaEllis/Pytorch-Medical-Segmentation/issues/8.
    """
    train_masks(attach, repaired=False)


@case(source="the repaired twin of `masks_of_zero_and_255`: divided by 255", tags=("segmentation", "twin"))
def masks_of_zero_and_one(attach: Attach) -> None:
    """The masks are divided by 255."""
    assert train_masks(attach, repaired=True) > 0.7


# ------------------------------------------------------------------------------------- a loss of thresholded pixels


def train_dice(attach: Attach, *, repaired: bool) -> float:
    """Return the intersection over union on new pictures."""
    torch.manual_seed(102)
    pictures, masks = cells(400, seed=2)
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for i in draws(400, size=16, steps=200):
        found = model(pictures[i]).sigmoid()
        if not repaired:
            found = (found > 0.5).float()
        dice = (2 * (found * masks[i]).sum() + 1) / (found.sum() + masks[i].sum() + 1)
        loss = 1 - dice
        if not loss.requires_grad:
            loss.requires_grad_(True)  # "element 0 of tensors does not require grad"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures[i])
    return overlap(model)


@case(
    fault="no-gradient",
    also=("loss-plateau", "not-optimized", "dead-layer"),
    onset=0,
    source="https://github.com/EasonChen99/I2D-Loc/issues/8",
    tags=("segmentation",),
)
def dice_of_thresholded_pixels(attach: Attach) -> None:
    """The Dice loss is computed from pixels that are thresholded, which cuts the graph. The error message is silenced
    by `loss.requires_grad_(True)`, and nothing is ever updated. The two mistakes are reported in
    https://github.com/EasonChen99/I2D-Loc/issues/8 and
    https://github.com/wonbeomjang/mobile-hair-segmentation-pytorch/issues/3.
    """
    train_dice(attach, repaired=False)


# ------------------------------------------------------------------------------------ a data set that wears away


class StoredDigits(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in memory, from 0 to 255, which are normalized when they are read."""

    def __init__(self, *, copies: bool) -> None:
        x, self.labels, _, _ = digits()
        self.images = x * 255
        self.mean, self.std = self.images.mean().item(), self.images.std().item()
        self.copies = copies

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].clone() if self.copies else self.images[index]
        image -= self.mean
        image /= self.std
        return image, self.labels[index]


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


def train_stored(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps. An epoch has 29 steps."""
    torch.manual_seed(103)
    loader = DataLoader(StoredDigits(copies=repaired), batch_size=48, shuffle=True, drop_last=True)
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for _ in range(7):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=images)
            losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    also=("constant-batch", "vanishing-gradient", "train-eval-mismatch", "dead-layer"),
    tolerate=("learning-rate-too-high", "dead-relu", "rising-sparsity"),
    onset=29,
    source="https://github.com/facebookresearch/pycls/pull/21",
    tags=("data",),
)
def normalized_in_place_every_epoch(attach: Attach) -> None:
    """`__getitem__` normalizes the stored pictures in place: from the second epoch on all are nearly the same constant,
    and the loss jumps to that of a guess and stays there. A bug of the kind that is fixed in
    https://github.com/facebookresearch/pycls/pull/21; see also https://github.com/mindee/doctr/issues/840. No kind says
    that the inputs shrink; a plateau, or batches that are all the same, come nearest.
    """
    train_stored(attach, repaired=False)


@case(source="the repaired twin of `normalized_in_place_every_epoch`: it copies first", tags=("data", "twin"))
def normalized_in_a_copy(attach: Attach) -> None:
    """`__getitem__` normalizes a copy of the stored picture."""
    assert train_stored(attach, repaired=True) < 0.3


# --------------------------------------------------------------------------------- folders that number their classes


def train_folders(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy that the script measures in validation."""
    torch.manual_seed(104)
    x, y, test_x, test_y = digits()
    there = test_y != 3  # the folder of this class is empty
    test_x, test_y = test_x[there], test_y[there]
    if not repaired:
        test_y = torch.unique(test_y, return_inverse=True)[1]  # sorted folders are numbered from 0
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    accuracy = 0.0
    for step, i in enumerate(draws(len(x), size=48, steps=240)):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 != 19:
            monitor.step(loss, batch=x[i])
            continue
        model.eval()
        with torch.no_grad():
            logits = model(test_x)
            val_loss = criterion(logits, test_y)
        model.train()
        accuracy = (logits.argmax(1) == test_y).float().mean().item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    return accuracy


@case(
    fault="overfitting",
    also=("train-eval-mismatch",),
    onset=39,
    source="https://github.com/huggingface/pytorch-image-models/issues/957",
    tags=("data", "validation"),
)
def empty_validation_folder(attach: Attach) -> None:
    """Classes are numbered by the folders that have pictures. One folder of the validation set is empty, so that all
    later classes have other numbers than in training, and the validation loss rises while the training loss falls.
    Reported in https://github.com/huggingface/pytorch-image-models/issues/957 and
    https://github.com/weecology/DeepForest/pull/1147. No kind says that labels differ; what is seen is overfitting.
    """
    train_folders(attach, repaired=False)


# ------------------------------------------------------------------------------------------------------- odd recipes


@case(source="Zhang et al. 2018, mixup; Szegedy et al. 2016, sec. 7", tags=("mixup", "odd"))
def mixup_and_smooth_labels(attach: Attach) -> None:
    """Pictures and labels are mixed in pairs and labels are smoothed, so that the loss cannot fall below about 1.2 and
    stays far above the validation loss.
    """
    torch.manual_seed(105)
    x, y, test_x, test_y = digits()
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        part = torch.distributions.Beta(1.0, 1.0).sample()
        other = i[torch.randperm(len(i))]
        logits = model(part * x[i] + (1 - part) * x[other])
        first, second = (F.cross_entropy(logits, y[j], label_smoothing=0.1) for j in (i, other))
        loss = part * first + (1 - part) * second
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 29:
            with torch.no_grad():
                val_loss = F.cross_entropy(model(test_x), test_y)
            monitor.step(loss, batch=x[i], val_loss=val_loss)
        else:
            monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


class SkippedBlocks(nn.Module):
    """Residual blocks, each of which is skipped in some steps; the later the more often."""

    def __init__(self, depth: int = 8, width: int = 64) -> None:
        super().__init__()
        self.entry = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.exit = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.flatten(1))
        for i, block in enumerate(self.blocks):
            kept = 1 - 0.5 * (i + 1) / len(self.blocks)
            if not self.training:
                x = x + kept * block(x)
            elif torch.rand(()) < kept:
                x = x + block(x)
        return self.exit(x)


@case(source="Huang et al. 2016, Deep networks with stochastic depth", tags=("stochastic-depth", "odd"))
def blocks_skipped_at_random(attach: Attach) -> None:
    """A block that a step skips has no gradient in that step; the last one is skipped in every second step."""
    torch.manual_seed(106)
    x, y, test_x, test_y = digits()
    model = SkippedBlocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=300):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93
