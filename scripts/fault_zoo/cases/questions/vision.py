"""Pictures: masks that are turned, scores for the wrong loss, lost positions, and three recipes that look odd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scripts.fault_zoo.cases.mailing.material import cells, digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ masks turned another way


class RandomTurn:
    """Flip a picture left to right, upside down, or both, or turn it by 90 degrees."""

    def __call__(self, picture: Tensor) -> Tensor:
        if torch.rand(1).item() < 0.5:
            picture = picture.flip(-1)
        if torch.rand(1).item() < 0.5:
            picture = picture.flip(-2)
        if torch.rand(1).item() < 0.5:
            picture = picture.transpose(-1, -2)
        return picture


class Cells(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int, *, together: bool) -> None:
        self.pictures, self.masks = cells(count, seed=3)
        self.transform = RandomTurn()
        self.together = together

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, mask = self.pictures[index], self.masks[index]
        if self.together:
            picture, mask = self.transform(torch.cat([picture, mask])).split(1)
        else:
            picture, mask = self.transform(picture), self.transform(mask)
        return picture, mask


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(36, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.head = nn.Conv2d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.bottom(F.max_pool2d(skip, 2))
        return self.head(self.up(torch.cat([skip, F.interpolate(deep, scale_factor=2)], 1)))


def train_cells(attach: Attach, *, together: bool) -> float:
    """Return the intersection over union on new pictures."""
    torch.manual_seed(61)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    loader = DataLoader(Cells(480, together=together), batch_size=16, shuffle=True)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(10):
        for picture, mask in loader:
            optimizer.zero_grad()
            loss = criterion(model(picture), mask)
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=picture)
    model.eval()
    pictures, masks = cells(200, seed=98)
    with torch.no_grad():
        found, wanted = model(pictures) > 0, masks > 0
    return ((found & wanted).sum() / (found | wanted).sum()).item()


@case(
    fault="loss-plateau",
    tolerate=("oscillating-gradient",),
    onset=0,
    source="https://github.com/mdbloice/Augmentor/issues/205",
    tags=("segmentation", "augmentation"),
)
def masks_turned_another_way(attach: Attach) -> None:
    """The transform is called for the picture and again for its mask, and draws again each time: only one mask in
    eight belongs to its picture. Reported in https://github.com/mdbloice/Augmentor/issues/205,
    https://github.com/wassname/pipe-segmentation/issues/1, https://github.com/aleju/imgaug/issues/132 and
    https://github.com/thuanz123/realfill/issues/4.
    """
    train_cells(attach, together=False)


# ------------------------------------------------------------------------------------ scores for another loss


def train_digits(attach: Attach, criterion: nn.Module) -> float:
    """Return the accuracy on digits for testing."""
    torch.manual_seed(62)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=400):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="exploding-gradient",
    also=("probabilities-into-loss",),
    tolerate=("learning-rate-too-high", "gradient-spike", "layer-imbalance", "dead-relu", "oscillating-gradient"),
    onset=0,
    source="https://github.com/pytorch/pytorch/pull/12703",
    tags=("cnn", "loss"),
)
def scores_into_negative_log_likelihood(attach: Attach) -> None:
    """`NLLLoss` gets the scores of the last layer, without a log-softmax: the loss is minus the score of the right
    class, which grows without end. Reported in https://github.com/pytorch/pytorch/pull/12703, where the example of
    the documentation had this error.
    """
    train_digits(attach, nn.NLLLoss())


# ------------------------------------------------------------------------------------ positions that do not stay


class PatchReader(nn.Module):
    """Attention over 16 patches of 2 x 2 pixels."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)
        self.position = nn.Parameter(torch.randn(16, 32)) if keeps else None

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        position = nn.Parameter(torch.randn(16, 32)) if self.position is None else self.position
        hidden = self.entry(patches) + position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def train_patches(attach: Attach, *, keeps: bool) -> float:
    """Return the accuracy on digits for testing."""
    torch.manual_seed(63)
    x, y, x_test, y_test = digits()
    model = PatchReader(keeps=keeps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for i in draws(len(x), size=32, steps=500):
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="not-optimized",
    also=("no-gradient", "loss-plateau"),
    onset=0,
    source="https://github.com/leaderj1001/Stand-Alone-Self-Attention/issues/2",
    tags=("transformer", "position"),
)
def positions_made_in_forward(attach: Attach) -> None:
    """The embedding of the positions is an `nn.Parameter` that `forward` makes: it is drawn again in each step, gets a
    gradient, and no optimizer knows it. Reported in
    https://github.com/leaderj1001/Stand-Alone-Self-Attention/issues/2; much the same in
    https://github.com/SimonThomine/RememberingNormality/issues/7.
    """
    train_patches(attach, keeps=False)


# ------------------------------------------------------------------------------------ odd recipes


@case(source="Ulyanov et al. 2018, Deep Image Prior, sec. 3.1", tags=("denoising", "one-picture", "odd"))
def one_noisy_picture(attach: Attach) -> None:
    """A network turns a fixed tensor of noise into one noisy picture. Every step has the same input and the same
    target, on purpose: stopped early, the network has drawn the picture and not yet its noise.
    """
    torch.manual_seed(64)
    clean = digits()[0][:16].reshape(4, 4, 8, 8).permute(0, 2, 1, 3).reshape(1, 1, 32, 32)
    noisy = clean + 0.3 * torch.randn_like(clean)
    source = 0.1 * torch.rand(1, 16, 8, 8)
    model = nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    errors = []
    for _ in range(140):
        optimizer.zero_grad()
        picture = model(source)
        loss = F.mse_loss(picture, noisy)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=source)
        errors.append(F.mse_loss(picture.detach(), clean).item())
    assert errors[-1] < 0.6 * F.mse_loss(noisy, clean).item(), errors[-1]


@case(source="Lin et al. 2017, Focal Loss, sec. 3.3 and 4.1", tags=("detection", "imbalance", "odd"))
def stars_with_focal_loss(attach: Attach) -> None:
    """One pixel in 200 is a star. The last bias starts at -4.6, so that all pixels are background at first, and
    pixels of which the network is sure count next to nothing: nearly all of the loss is that of a few pixels.
    """
    torch.manual_seed(65)
    spread = torch.tensor([[[[0.3, 0.6, 0.3], [0.6, 1.0, 0.6], [0.3, 0.6, 0.3]]]])

    def sky(count: int) -> tuple[Tensor, Tensor]:
        stars = (torch.rand(count, 1, 24, 24) < 0.005).float()
        light = F.conv2d(stars * (0.5 + torch.rand_like(stars)), spread, padding=1)
        return light + 0.2 * torch.randn_like(light), stars

    head = nn.Conv2d(16, 1, 1, bias=False)
    head.bias = nn.Parameter(torch.tensor([-math.log((1 - 0.01) / 0.01)]))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), head)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for _ in range(300):
        picture, star = sky(16)
        score = model(picture)
        chance = torch.sigmoid(score)
        right = star * chance + (1 - star) * (1 - chance)
        weight = (0.75 * star + 0.25 * (1 - star)) * (1 - right) ** 2
        cost = F.binary_cross_entropy_with_logits(score, star, reduction="none")
        loss = (weight * cost).sum() / star.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
    picture, star = sky(64)
    with torch.no_grad():
        found = model(picture) > 0
    assert 2 * (found & (star > 0)).sum() > 0.7 * (found.sum() + star.sum())


@case(source="Howard 2018, training with progressive resizing (fast.ai, DAWNBench)", tags=("cnn", "curriculum", "odd"))
def pictures_that_grow(attach: Attach) -> None:
    """Training starts with pictures of 4 x 4 pixels and goes on with 6 x 6 and 8 x 8. The loss jumps up each time."""
    torch.manual_seed(66)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        size = (4, 6, 8)[step // 100]
        picture = F.interpolate(x[i], size=(size, size), mode="area")
        loss = criterion(model(picture), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
    model.eval()
    with torch.no_grad():
        assert (model(x_test).argmax(1) == y_test).float().mean() > 0.95
