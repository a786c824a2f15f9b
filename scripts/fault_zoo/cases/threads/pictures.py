"""Pictures: labels in two columns, two preparations, first weights that are too large, and three runs that look odd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case


def convnet(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


# ------------------------------------------------------------------------------------ labels in two columns


def binary_crossentropy(p: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all elements, as Keras computes it."""
    p = p.clamp(1e-7, 1 - 1e-7)
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean()


def train_small_or_large(attach: Attach, *, class_mode: str) -> float:
    """Return the accuracy on digits for testing."""
    torch.manual_seed(221)
    x, y, x_test, y_test = digits()
    large = (y >= 5).long()
    target = F.one_hot(large, 2).float() if class_mode == "categorical" else large[:, None].float()
    model = nn.Sequential(convnet(1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=binary_crossentropy)
    for i in draws(len(x), size=32, steps=300):
        loss = binary_crossentropy(model(x[i]), target[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return ((model(x_test)[:, 0] > 0.5) == (y_test >= 5)).float().mean().item()


@case(
    fault="loss-plateau",
    tolerate=("vanishing-gradient", "dead-layer", "oscillating-gradient"),
    onset=0,
    source="https://github.com/keras-team/keras/issues/13006",
    tags=("cnn", "labels"),
)
def labels_in_two_columns(attach: Attach) -> None:
    """The generator yields categorical labels, (N, 2), by default, and the network has one sigmoid, (N, 1). The loss
    broadcasts: each picture is told to be of both classes, and the loss stays at 0.6931.
    """
    train_small_or_large(attach, class_mode="categorical")


@case(source="the repaired twin of `labels_in_two_columns`", tags=("cnn", "labels", "twin"))
def labels_in_one_column(attach: Attach) -> None:
    """The generator is told that the labels are binary."""
    assert train_small_or_large(attach, class_mode="binary") > 0.95


# ------------------------------------------------------------------------------------ two preparations


def rescale(pixels: Tensor) -> Tensor:
    """Return pixels from 0 to 1."""
    return pixels / 255


def preprocess_input(pixels: Tensor) -> Tensor:
    """Return pixels less the mean of another dataset, as the zoo of pretrained networks wants them."""
    return pixels - 116.8


def train_two_generators(attach: Attach, *, same: bool) -> float:
    """Return the accuracy on the pictures for validation, as they are prepared."""
    torch.manual_seed(222)
    x, y, x_val, y_val = digits()
    pixels, x_val = 255 * x, (preprocess_input if same else rescale)(255 * x_val)
    model = convnet(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=400)):
        model.train()
        picture = preprocess_input(pixels[i])
        loss = criterion(model(picture), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 40 == 39:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(x_val), y_val).item()
        monitor.step(loss, batch=picture, val_loss=val_loss)
    with torch.no_grad():
        return (model(x_val).argmax(1) == y_val).float().mean().item()


@case(
    fault="train-eval-mismatch",
    also=("overfitting",),
    tolerate=("poor-initialization", "exploding-gradient"),
    onset=39,
    source="https://github.com/keras-team/keras/issues/12689",
    tags=("cnn", "validation", "data"),
)
def pictures_prepared_two_ways(attach: Attach) -> None:
    """The pictures for training lose a mean, those for validation are divided by 255. The loss falls to 0.02, and the
    loss in validation stays at 2.3 with an accuracy of 0.10, which is chance.
    """
    train_two_generators(attach, same=False)


# ------------------------------------------------------------------------------------ first weights that are too large


class ChannelAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 4, 1),
            nn.ReLU(),
            nn.Conv2d(channels // 4, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            ChannelAttention(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class RCAN(nn.Module):
    """Residual groups in a residual group: pictures of 4 x 4 pixels to 8 x 8."""

    def __init__(self, channels: int = 8, groups: int = 6, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, channels, 3, padding=1)
        self.groups = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(channels) for _ in range(blocks)), nn.Conv2d(channels, channels, 3, padding=1)
            )
            for _ in range(groups)
        )
        self.tail = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        x = deep = self.head(x)
        for group in self.groups:
            deep = deep + group(deep)
        return self.tail(x + deep)


def train_rcan(attach: Attach, *, lecun_normal: bool) -> float:
    """Return the mean absolute error on pictures for testing, in shades of 0 to 255."""
    torch.manual_seed(223)
    x, _, x_test, _ = digits()
    model = RCAN()
    if lecun_normal:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    monitor = attach(model, optimizer, loss_fn=F.l1_loss)
    for i in draws(len(x), size=16, steps=150):
        sharp = 255 * x[i]
        small = F.avg_pool2d(sharp, 2)
        loss = F.l1_loss(model(small), sharp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=small)
    with torch.no_grad():
        return F.l1_loss(model(F.avg_pool2d(255 * x_test, 2)), 255 * x_test).item()


@case(
    fault="poor-initialization",
    also=("exploding-gradient",),
    tolerate=("learning-rate-too-low", "layer-imbalance", "saturated-activation"),
    onset=0,
    source="https://github.com/yulunzhang/RCAN/issues/76",
    tags=("super-resolution", "initialization"),
)
def first_weights_too_large(attach: Attach) -> None:
    """48 residual blocks without a norm start from LeCun's normal weights instead of the smaller ones of PyTorch. The
    first loss is 2207 shades, where the default has 109, and is still above 380 after 150 steps (45).
    """
    train_rcan(attach, lecun_normal=True)
