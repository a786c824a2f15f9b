"""Pictures: two domains, detection, distillation, pruning and quantisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, digits, setup, split
from scripts.fault_zoo.protocol import Attach, case


def normalized_net(width: int = 16) -> nn.Sequential:
    """Return a network with batch norms for digits of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def train_two_domains(attach: Attach, *, together: bool) -> float:
    """Learn labelled pictures, and be certain about dark ones without labels. Return the last validation loss."""
    setup(51)
    x, y = digits()
    (train_x, train_y), (val_x, val_y) = split(x, y)
    dark = (0.25 * train_x - 1.5).roll(300, 0)
    model = normalized_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    val_loss = 0.0
    for step, (images, labels, others) in enumerate(batches(train_x, train_y, dark, size=64, steps=250)):
        model.train()
        if together:
            logits, other_logits = model(torch.cat([images, others])).chunk(2)
        else:
            logits, other_logits = model(images), model(others)
        doubt = -(other_logits.softmax(1) * other_logits.log_softmax(1)).sum(1).mean()
        loss = F.cross_entropy(logits, labels) + 0.05 * doubt
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(val_x), val_y).item()
            monitor.step(loss, batch=images, val_loss=val_loss)
        else:
            monitor.step(loss, batch=images)
    return val_loss


@case(
    fault="train-eval-mismatch",
    onset=0,
    tolerate=("overfitting",),
    source=(
        "https://github.com/wasidennis/AdaptSegNet/issues/79, https://github.com/scikit-adaptation/skada/issues/252, "
        "https://github.com/adapt-python/adapt/issues/92"
    ),
    tags=("batch-norm", "domains"),
)
def batch_norm_two_domains(attach: Attach) -> None:
    """Each domain is normalised by its own batches, and the running statistics mix the two and fit neither."""
    train_two_domains(attach, together=False)


@case(source="https://github.com/scikit-adaptation/skada/issues/252", tags=("batch-norm", "domains", "twin"))
def batch_norm_two_domains_fixed(attach: Attach) -> None:
    """Both domains go through the network in one batch."""
    assert train_two_domains(attach, together=True) < 0.5


class Detector(nn.Module):
    """Find the one digit in a picture of 14 x 14 pixels and name it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.box = nn.Linear(288, 2)
        self.name = nn.Linear(288, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.box(h), self.name(h)


def scatter(x: Tensor) -> tuple[Tensor, Tensor]:
    """Put each digit somewhere on a larger canvas; return the pictures and the corners in 0..1."""
    corner = torch.randint(0, 7, (len(x), 2))
    canvas = torch.zeros(len(x), 1, 14, 14)
    for i, (row, column) in enumerate(corner.tolist()):
        canvas[i, :, row : row + 8, column : column + 8] = x[i]
    return canvas, corner / 6


def train_detector(attach: Attach, *, squash: bool) -> float:
    """Train on boxes and names. Return the share of right names in the last 30 batches."""
    setup(52)
    x, y = digits()
    canvas, corner = scatter(x)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    name_criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer)
    right = []
    for images, corners, labels in batches(canvas, corner, y, size=64, steps=300):
        boxes, names = model(images)
        if squash:
            names = torch.sigmoid(names)
        loss = 5 * F.mse_loss(boxes, corners) + name_criterion(names, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
        right.append((names.argmax(1) == labels).float().mean().item())
    return sum(right[-30:]) / 30


@case(
    fault="probabilities-into-loss",
    also=("loss-plateau", "saturated-activation"),
    onset=0,
    source="https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/108",
    tags=("detection",),
)
def detector_sigmoid_into_cross_entropy(attach: Attach) -> None:
    """The class scores go through a sigmoid before the cross entropy, which cannot fall below 1.46 then."""
    train_detector(attach, squash=True)


@case(source="https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/108", tags=("detection", "twin"))
def detector_sigmoid_into_cross_entropy_fixed(attach: Attach) -> None:
    """The class scores go into the cross entropy as they are."""
    assert train_detector(attach, squash=False) > 0.75


@case(source="Hinton et al. 2015, Distilling the knowledge in a neural network", tags=("distillation", "odd"))
def student_of_soft_labels(attach: Attach) -> None:
    """A student learns from a teacher's soft labels only: the loss is a divergence of 16 times tiny numbers, and no
    label appears.
    """
    setup(53)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    teacher = normalized_net(32)
    first = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for images, labels in batches(train_x, train_y, size=64, steps=200, seed=1):
        first.zero_grad()
        F.cross_entropy(teacher(images), labels).backward()
        first.step()
    teacher.eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    monitor = attach(student, optimizer)
    for (images,) in batches(train_x, size=64, steps=300):
        with torch.no_grad():
            wanted = (teacher(images) / 4).log_softmax(1)
        loss = 16 * F.kl_div((student(images) / 4).log_softmax(1), wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert (student(test_x).argmax(1) == test_y).float().mean() > 0.9


@case(
    source="Zhu & Gupta 2018, To prune, or not to prune (gradual magnitude pruning)",
    tags=("pruning", "odd"),
    tolerate=("rising-sparsity",),
)
def pruned_to_a_plan(attach: Attach) -> None:
    """Every 25 steps more of the small weights are set to zero, up to nine in ten; the loss jumps and comes back."""
    setup(54)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    first, second = nn.Linear(64, 192), nn.Linear(192, 192)
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(192, 10))
    weights = [first.weight, second.weight]
    masks = [torch.ones_like(weight) for weight in weights]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (images, labels) in enumerate(batches(train_x, train_y, size=64, steps=350)):
        if step % 25 == 0 and 75 <= step <= 250:
            share = 0.9 * (1 - (1 - (step - 50) / 200) ** 3)
            for weight, mask in zip(weights, masks, strict=True):
                size = weight.detach().abs().flatten()
                mask.copy_((weight.detach().abs() > size.kthvalue(int(share * len(size))).values).float())
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                weight.mul_(mask)
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert float((second.weight == 0).float().mean()) > 0.85
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round to 2**bits levels; the gradient passes as if nothing was rounded."""
    step = x.detach().abs().max() / (2 ** (bits - 1) - 1) + 1e-8
    return x + ((x / step).round() * step - x).detach()


class Rounded(nn.Linear):
    """A layer whose weights and inputs are rounded to four bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x, 4), rounded(self.weight, 4), self.bias)


@case(source="Jacob et al. 2018, Quantization and training of neural networks, sec. 3", tags=("quantisation", "odd"))
def four_bit_training(attach: Attach) -> None:
    """Quantisation-aware training: the loss is noisy, since small updates change no rounded weight for many steps."""
    setup(55)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    model = nn.Sequential(nn.Flatten(), Rounded(64, 128), nn.ReLU(), Rounded(128, 64), nn.ReLU(), Rounded(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(train_x, train_y, size=64, steps=300):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.9
