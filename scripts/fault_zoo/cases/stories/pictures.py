"""Pictures: a scale for training alone, a teacher in another order, heads without a norm, and a half-precision mask."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a scale for training alone


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def train_scaled(attach: Attach, *, scales_test: bool) -> float:
    """Return the accuracy on new pictures."""
    torch.manual_seed(531)
    x, y, x_test, y_test = digits()
    x, x_test = 16 * x, 16 * x_test
    mean, std = x.mean(), x.std()
    x = (x - mean) / std
    if scales_test:
        x_test = (x_test - mean) / std
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=250)):
        model.train()
        loss = criterion(model(x[i]), y[i])
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
    also=("overfitting",),
    onset=24,
    source="https://github.com/JeasunLok/ResNet-pytorch/issues/1",
    tags=("cnn", "data"),
)
def scaled_for_training_alone(attach: Attach) -> None:
    """Pictures are scaled to mean 0 and deviation 1 for training, but not for the validation and the test. The training
    loss falls to 0.02, the validation loss is about 10, and the accuracy on new pictures is 0.46.
    """
    train_scaled(attach, scales_test=False)


@case(source="the repaired twin of `scaled_for_training_alone`", tags=("cnn", "data", "twin"))
def scaled_for_both(attach: Attach) -> None:
    """Pictures for the validation are scaled as well; the accuracy is 0.99."""
    assert train_scaled(attach, scales_test=True) > 0.97


# ------------------------------------------------------------------------------------ a teacher in another order


def small_cnn(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def distillation(student: Tensor, labels: Tensor, teacher: Tensor, *, alpha: float, temperature: float) -> Tensor:
    soft = F.kl_div((student / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="batchmean")
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student, labels)


def train_student(attach: Attach, *, same_order: bool) -> float:
    """Return the accuracy of the student on new pictures."""
    torch.manual_seed(532)
    x, y, x_test, y_test = digits()
    teacher = small_cnn(32)
    first = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for i in draws(len(x), size=64, steps=200):
        loss = F.cross_entropy(teacher(x[i]), y[i])
        first.zero_grad()
        loss.backward()
        first.step()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)
    with torch.no_grad():
        outputs = [teacher(pictures) for pictures, _ in loader]
    student = small_cnn(4)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    monitor = attach(student, optimizer)
    for _ in range(6):
        for place, (pictures, labels) in enumerate(loader):
            if same_order:
                with torch.no_grad():
                    told = teacher(pictures)
            else:
                told = outputs[place]
            loss = distillation(student(pictures), labels, told, alpha=0.95, temperature=6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=pictures)
    with torch.no_grad():
        return (student(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/haitongli/knowledge-distillation-pytorch/pull/16",
    tags=("distillation", "data"),
)
def teacher_in_another_order(attach: Attach) -> None:
    """The outputs of a teacher are stored batch by batch, from a loader that shuffles. In training, the loader shuffles
    again, and a student hears what the teacher said of other digits. The loss stays at 17, the accuracy at 0.11. No
    kind for wrong targets exists.
    """
    train_student(attach, same_order=False)


@case(source="the repaired twin of `teacher_in_another_order`", tags=("distillation", "data", "twin"))
def teacher_of_the_same_batch(attach: Attach) -> None:
    """The teacher sees the batch of the student; the loss falls below 1, and the accuracy is 0.95."""
    assert train_student(attach, same_order=True) > 0.9


# ------------------------------------------------------------------------------------ heads without a norm


@lru_cache(None)
def plates(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures (N, 1, 32, 32) of a bright plate, heat maps of its center (N, 1, 16, 16), the cell of the center,
    and the width and height of the plate in pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    center = torch.randint(8, 24, (count, 2), generator=generator).float()
    size = torch.randint(4, 15, (count, 2), generator=generator).float()
    inside = ((row - center[:, :1, None]).abs() < size[:, :1, None] / 2) & (
        (column - center[:, 1:, None]).abs() < size[:, 1:, None] / 2
    )
    pictures = 60 * inside + 15 * torch.rand(count, 32, 32, generator=generator)
    cell = (center / 2).long()
    half = torch.arange(16)
    squares = (half[:, None] - cell[:, :1, None]) ** 2 + (half - cell[:, 1:, None]) ** 2
    return pictures[:, None], (-squares / 2.0).exp()[:, None], cell, size


class CenterNet(nn.Module):
    def __init__(self, width: int = 24, *, has_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=d, dilation=d) for d in (1, 2, 3))

        def head(outputs: int) -> nn.Sequential:
            norm = [nn.BatchNorm2d(width)] if has_norm else []
            conv = nn.Conv2d(width, width, 3, padding=1)
            return nn.Sequential(conv, *norm, nn.ReLU(), nn.Conv2d(width, outputs, 1))

        self.heat, self.size = head(1), head(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.heat(x).sigmoid(), self.size(x)


def focal(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the focal loss of heat maps whose peaks are 1."""
    is_peak = wanted.eq(1).float()
    hit = found.log() * (1 - found) ** 2 * is_peak
    miss = (1 - found).log() * found**2 * (1 - wanted) ** 4 * (1 - is_peak)
    return -(hit + miss).sum() / is_peak.sum()


def train_detector(attach: Attach, *, has_norm: bool) -> float:
    """Return the mean error of the size of new plates, in pixels."""
    torch.manual_seed(533)
    x, heat, cell, size = plates(640, seed=1)
    model = CenterNet(has_norm=has_norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=16, steps=200):
        found, sizes = model(x[i])
        at = sizes[torch.arange(len(i)), :, cell[i, 0], cell[i, 1]]
        loss = focal(found, heat[i]) + 0.1 * F.l1_loss(at, size[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    x, _, _, size = plates(100, seed=2)
    with torch.no_grad():
        found, sizes = model(x)
    best = sizes.flatten(2)[torch.arange(100), :, found.flatten(1).argmax(1)]
    return (best - size).abs().mean().item()


@case(
    fault="non-finite",
    also=("unstable-formula", "exploding-gradient", "poor-initialization", "learning-rate-too-high"),
    tolerate=("saturated-activation", "gradient-spike", "layer-imbalance"),
    onset=0,
    source="https://github.com/yijingru/BBAVectors-Oriented-Object-Detection/issues/15",
    tags=("detection", "norm"),
)
def heads_without_a_norm(attach: Attach) -> None:
    """A detector has no norm in its heads. The features are so large that the scores saturate after 2 updates, and the
    logarithm in the focal loss makes the loss NaN.
    """
    train_detector(attach, has_norm=False)


@case(source="the repaired twin of `heads_without_a_norm`", tags=("detection", "norm", "twin"))
def heads_with_a_norm(attach: Attach) -> None:
    """Each head has a BatchNorm; the sizes of new plates are off by 0.6 pixels."""
    assert train_detector(attach, has_norm=True) < 1


# ------------------------------------------------------------------------------------ a half-precision mask


class PartialConv(nn.Module):
    """A convolution of the pixels that are known, scaled by how many of its window are known (Liu et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, *, eps: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs, 1, 1))
        self.eps = eps

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        known = F.conv2d(mask, torch.ones(1, 1, 3, 3), padding=1)
        is_known = known.clamp(0, 1)
        ratio = 9 / (known + self.eps) * is_known
        return (self.conv(x * mask) * ratio + self.bias) * is_known, is_known


class Inpainter(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.enter = PartialConv(1, 32, eps=eps)
        self.deep = nn.ModuleList(PartialConv(32, 32, eps=eps) for _ in range(3))
        self.out = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, mask = self.enter(x, mask)
        x = F.relu(x)
        for layer in self.deep:
            y, mask = layer(x, mask)
            x = F.relu(x + y)
        return self.out(x)


def train_inpainter(attach: Attach, *, eps: float) -> float:
    """Return the mean absolute error inside the holes of new pictures."""
    torch.manual_seed(534)
    x, _, x_test, _ = digits()
    generator = torch.Generator().manual_seed(4)

    def holes(count: int) -> Tensor:
        """Return masks with a hole of 3 to 5 pixels, in which they are 0."""
        row, column = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
        at = torch.randint(0, 4, (count, 2, 1, 1), generator=generator)
        size = torch.randint(3, 6, (count, 1, 1), generator=generator)
        hidden = (row >= at[:, 0]) & (row < at[:, 0] + size) & (column >= at[:, 1]) & (column < at[:, 1] + size)
        return (~hidden)[:, None].float()

    model = Inpainter(eps)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    monitor = attach(model, optimizer, scaler=scaler)
    for i in draws(len(x), size=16, steps=160):
        mask = holes(len(i))
        with torch.autocast("cpu", dtype=torch.float16):
            made = model(x[i], mask)
        loss = (made.float() - x[i]).abs().mean() + 4 * ((made.float() - x[i]).abs() * (1 - mask)).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=x[i])
    mask = holes(len(x_test))
    with torch.no_grad():
        error = (model(x_test, mask) - x_test).abs() * (1 - mask)
    return (error.sum() / (1 - mask).sum()).item()


@case(
    fault="non-finite",
    also=("unstable-formula", "loss-scale-collapse"),
    tolerate=("fp16-underflow", "not-optimized"),
    onset=0,
    source="https://github.com/jingyuanli001/RFR-Inpainting/issues/8",
    tags=("inpainting", "fp16"),
)
def mask_in_half_precision(attach: Attach) -> None:
    """A partial convolution divides by the number of known pixels plus 1e-8, which is 0 in half precision. Where a
    whole window is hidden, the outputs are NaN from the first step on, and the scaler skips every update. The error
    inside the holes stays at 0.63.
    """
    train_inpainter(attach, eps=1e-8)


@case(source="the repaired twin of `mask_in_half_precision`", tags=("inpainting", "fp16", "twin"))
def mask_with_an_epsilon_that_fits(attach: Attach) -> None:
    """The small number is 0.001, which half precision can hold; the error is 0.22."""
    assert train_inpainter(attach, eps=1e-3) < 0.3
