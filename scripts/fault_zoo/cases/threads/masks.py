"""Maps of pictures: a rate for another optimizer, an evaluation amid the epoch, and depth with holes."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, draws
from scripts.fault_zoo.protocol import Attach, case


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.enter = double_conv(inputs, width)
        self.down = double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = double_conv(2 * width, width)
        self.out = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        deep = self.down(F.max_pool2d(skip, 2))
        return self.out(self.leave(torch.cat([skip, self.up(deep)], 1)))


def overlap(found: Tensor, wanted: Tensor) -> float:
    """Return the intersection over union."""
    return ((found & wanted).sum() / (found | wanted).sum()).item()


# ------------------------------------------------------------------------------------ a rate that is too large


@lru_cache(None)
def vessels(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (N, 1, 16, 16) of two curved vessels each, and where the vessels are, as 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    start, slope, bend = (torch.randn(count, 2, 1, 1, generator=generator) for _ in range(3))
    place = 7.5 + 4 * start + slope * (column - 7.5) * 0.6 + 0.05 * bend * (column - 7.5) ** 2
    inside = ((row - place).abs() < 1).any(1)
    pictures = 0.5 * inside + 0.2 * torch.randn(count, 16, 16, generator=generator)
    return pictures[:, None], inside.long()


class SharedBlock(nn.Module):
    """A residual block that uses one convolution twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.bn1(F.relu(self.conv(x))))
        return F.relu(x + self.bn2(self.conv(out)))


class LadderNet(nn.Module):
    """Two U-Nets in a row, with sums for skips."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(SharedBlock(width) for _ in range(3))
        self.deep = nn.ModuleList(SharedBlock(2 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1) for _ in range(2))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for _ in range(2))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](F.relu(self.enter(x)))
        for down, deep, up, block in zip(self.downs, self.deep, self.ups, self.blocks[1:], strict=True):
            x = block(up(deep(F.relu(down(x)))) + x)
        return self.out(x)


def train_vessels(attach: Attach, *, rate: float) -> float:
    """Return the intersection over union on new pictures."""
    torch.manual_seed(211)
    x, y = vessels(600, seed=1)
    x_val, y_val = vessels(100, seed=2)
    model = LadderNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=20, steps=300)):
        model.train()
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 30 == 29:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(x_val), y_val).item()
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    model.eval()
    with torch.no_grad():
        return overlap(model(x_val).argmax(1) == 1, y_val == 1)


@case(
    fault="learning-rate-too-high",
    also=("exploding-gradient",),
    tolerate=("gradient-spike", "oscillating-gradient", "dead-relu", "overfitting", "train-eval-mismatch"),
    onset=0,
    source="https://github.com/juntang-zhuang/LadderNet/issues/1",
    tags=("segmentation", "rate"),
)
def vessels_learned_too_fast(attach: Attach) -> None:
    """The rate of Adam is 1 and should be 0.001: a wrong version of the script was uploaded. The loss rises from 0.6 to
    above 10 in the first 30 steps, bounces, and the overlap with the vessels stays below 0.01.
    """
    train_vessels(attach, rate=1.0)


@case(source="the repaired twin of `vessels_learned_too_fast`", tags=("segmentation", "rate", "twin"))
def vessels_learned_gently(attach: Attach) -> None:
    """The rate is 0.001; the overlap is 0.92."""
    assert train_vessels(attach, rate=1e-3) > 0.85


# ------------------------------------------------------------------------------------ an evaluation amid the epoch


def dice(net: nn.Module, pictures: Tensor, masks: Tensor) -> float:
    """Return the Dice coefficient on pictures for validation."""
    net.eval()
    with torch.no_grad():
        found = (net(pictures) > 0).float()
    return (2 * (found * masks).sum() / (found.sum() + masks.sum() + 1e-6)).item()


def train_carvana(attach: Attach, *, back: bool) -> float:
    """Return the Dice coefficient on new pictures."""
    torch.manual_seed(212)
    x, masks = cells(480, seed=3)
    x_val, masks_val = cells(64, seed=4)
    net = UNet(1, 1)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(net, optimizer, loss_fn=criterion)
    step = 0
    for epoch in range(8):
        net.train()
        for i in draws(len(x), size=16, steps=30, seed=epoch):
            loss = criterion(net(x[i]), masks[i])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.1)
            optimizer.step()
            step += 1
            val_loss = None
            if step % 3 == 0:
                val_loss = 1 - dice(net, x_val, masks_val)
                if back:
                    net.train()
            monitor.step(loss, batch=x[i], val_loss=val_loss)
    return dice(net, *cells(200, seed=5))


@case(
    fault="train-eval-mismatch",
    onset=3,
    source="https://github.com/milesial/Pytorch-UNet/issues/165",
    tags=("segmentation", "mode"),
)
def evaluated_amid_the_epoch(attach: Attach) -> None:
    """`net.train()` is called at the start of an epoch, and `net.eval()` by the evaluation every three steps of it. The
    rest of the epoch trains in evaluation mode. The loss ends at twice that of the twin (0.05, 0.02).
    """
    train_carvana(attach, back=False)


@case(source="the repaired twin of `evaluated_amid_the_epoch`", tags=("segmentation", "mode", "twin"))
def evaluated_and_back_to_training(attach: Attach) -> None:
    """The evaluation puts the network back into training mode."""
    assert train_carvana(attach, back=True) > 0.93


# ------------------------------------------------------------------------------------ depth with holes


@lru_cache(None)
def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (N, 1, 16, 16) of a ball in front of a wall, and depth maps.

    A sensor leaves holes, which are NaN, in one map in 200.
    """
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    middle = torch.rand(count, 2, 1, 1, generator=generator) * 8 + 4
    size = torch.rand(count, 1, 1, generator=generator) * 3 + 2
    height = (size**2 - (row - middle[:, 0]) ** 2 - (column - middle[:, 1]) ** 2).clamp(min=0).sqrt()
    depth = 1 - height / 2.5
    pictures = torch.where(height > 0, height / size, 0.3) + 0.1 * torch.randn(count, 16, 16, generator=generator)
    has_hole = torch.rand(count, generator=generator) < 0.005
    hole = has_hole[:, None, None] & (torch.rand(count, 16, 16, generator=generator) < 0.02)
    return pictures[:, None], depth.masked_fill(hole, torch.nan)[:, None]


def train_depth_diffusion(attach: Attach, *, masked: bool) -> float:
    """Return the mean error of the noise at half of the schedule, on new scenes."""
    torch.manual_seed(213)
    x, depth = scenes(800, seed=6)
    net = UNet(3, 1)
    kept = torch.cos(torch.linspace(0.02, 1.55, 100)) ** 2
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    monitor = attach(net, optimizer, loss_fn=F.mse_loss)

    def predict(picture: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        return net(torch.cat([picture, noisy, (time / 100)[:, None, None, None].expand_as(noisy)], 1))

    for i in draws(len(x), size=16, steps=300):
        target = depth[i]
        valid = ~target.isnan() if masked else torch.ones_like(target, dtype=torch.bool)
        if masked:
            target = target.nan_to_num(1.0)
        time = torch.randint(0, 100, (len(i),))
        noise = torch.randn_like(target)
        share = kept[time][:, None, None, None]
        noisy = share.sqrt() * target + (1 - share).sqrt() * noise
        loss = F.mse_loss(predict(x[i], noisy, time)[valid], noise[valid])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    net.eval()
    picture, depth = scenes(100, seed=7)
    depth = depth.nan_to_num(1.0)
    time = torch.full((100,), 50)
    noise = torch.randn_like(depth)
    with torch.no_grad():
        noisy = kept[50].sqrt() * depth + (1 - kept[50]).sqrt() * noise
        return F.mse_loss(predict(picture, noisy, time), noise).item()


@case(
    fault="non-finite",
    onset=19,
    source="https://github.com/prs-eth/Marigold/issues/111",
    tags=("diffusion", "depth", "data"),
)
def depth_with_holes(attach: Attach) -> None:
    """A diffusion model learns depth from pictures. A few depth maps have holes, which are NaN. The first of them comes
    at step 19, and from there on the loss and all weights are NaN.
    """
    train_depth_diffusion(attach, masked=False)


@case(source="the repaired twin of `depth_with_holes`", tags=("diffusion", "depth", "data", "twin"))
def depth_with_filled_holes(attach: Attach) -> None:
    """Holes are filled, and left out of the loss."""
    assert train_depth_diffusion(attach, masked=True) < 0.1
