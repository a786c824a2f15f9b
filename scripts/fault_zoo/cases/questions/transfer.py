"""Transfer: a teacher that is in training, a checkpoint with other names, and digits that come in two parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case


def convnet(width: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Dropout2d(dropout),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, classes),
    )


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# ------------------------------------------------------------------------------------ a teacher that is in training


class Distiller(nn.Module):
    """Compare a student with a teacher that does not learn."""

    def __init__(self, teacher: nn.Module, student: nn.Module, *, repaired: bool) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student
        self.teacher.requires_grad_(False)
        self.repaired = repaired

    def train(self, mode: bool = True) -> Distiller:
        super().train(mode)
        if self.repaired:
            self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2, 1)
        return 4 * F.kl_div(F.log_softmax(self.student(x) / 2, 1), soft, reduction="batchmean")


def train_student(attach: Attach, *, repaired: bool) -> float:
    """Return the cross-entropy of the student on digits for testing."""
    torch.manual_seed(141)
    x, y, x_test, y_test = digits()
    teacher = convnet(24, 10, dropout=0.5)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for i in draws(len(x), size=64, steps=250):
        loss = F.cross_entropy(teacher(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    teacher.eval()

    student = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    distiller = Distiller(teacher, student, repaired=repaired)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    monitor = attach(distiller, optimizer)
    distiller.train()
    for i in draws(len(x), size=2, steps=1200, seed=1):
        loss = distiller(x[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    distiller.eval()
    with torch.no_grad():
        return F.cross_entropy(student(x_test), y_test).item()


@case(
    fault="train-eval-mismatch",
    layers=("teacher",),
    onset=0,
    source="https://github.com/neuralmagic/sparseml/pull/2191",
    tags=("distillation", "batch-norm", "dropout"),
)
def teacher_put_into_training(attach: Attach) -> None:
    """The teacher is a part of the module whose `train()` is called, so that half of its features are dropped and it
    normalizes by batches of two. Reported in https://github.com/neuralmagic/sparseml/pull/2191,
    https://github.com/yxuansu/TaCL/issues/11 and https://github.com/vrvlive/knowlege-distillation/issues/2.
    """
    train_student(attach, repaired=False)


@case(source="the repaired twin of `teacher_put_into_training`", tags=("distillation", "twin"))
def teacher_that_stays_calm(attach: Attach) -> None:
    """`train()` leaves the teacher in evaluation mode, on purpose."""
    assert train_student(attach, repaired=True) < 0.2


# ------------------------------------------------------------------------------------ a checkpoint with other names


def deep_net(classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, classes))


def train_from_checkpoint(attach: Attach, *, stripped: bool) -> float:
    """Return the accuracy on digits for testing, after fine-tuning to tell 5 to 9 apart with 20 pictures of each."""
    torch.manual_seed(142)
    x, y, x_test, y_test = digits()
    first, later = (y < 5).nonzero().squeeze(1), (y >= 5).nonzero().squeeze(1)[:100]
    large = nn.DataParallel(deep_net(5))
    optimizer = torch.optim.Adam(large.module.parameters(), lr=2e-3)
    for i in draws(len(first), size=32, steps=300):
        loss = F.cross_entropy(large.module(x[first[i]]), y[first[i]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checkpoint = large.state_dict()  # its names begin with "module."

    model = deep_net(5)
    if stripped:
        checkpoint = {name.removeprefix("module."): weight for name, weight in checkpoint.items()}
    model.load_state_dict(checkpoint, strict=False)  # the head may differ
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for i in draws(len(later), size=20, steps=150, seed=2):
        loss = F.cross_entropy(model(x[later[i]]), y[later[i]] - 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[later[i]])
    known = y_test >= 5
    return accuracy(model, x_test[known], y_test[known] - 5)


@case(
    fault="failed-load",
    also=("poor-initialization", "learning-rate-too-low", "loss-plateau"),
    tolerate=("vanishing-gradient",),
    onset=0,
    source="https://github.com/pytorch/examples/issues/1029",
    tags=("fine-tuning", "checkpoint"),
)
def checkpoint_with_other_names(attach: Attach) -> None:
    """All names in the checkpoint begin with `module.`, and `strict=False`, meant for the head, passes over all of
    them: the network is tuned from random weights at a rate for pretrained ones. Reported in
    https://github.com/pytorch/examples/issues/1029, https://github.com/BestJuly/IIC/issues/11 and
    https://github.com/pytorch/pytorch/issues/141256.
    """
    train_from_checkpoint(attach, stripped=False)


# ------------------------------------------------------------------------------------ an odd recipe


@case(source="Kirkpatrick et al. 2017, Elastic Weight Consolidation, eq. 3", tags=("continual", "odd"))
def digits_in_two_parts(attach: Attach) -> None:
    """First come the digits 0 to 4, then 5 to 9 with a penalty on weights that the first part needs. The loss jumps
    when the second part begins, and the penalty weighs each weight by its curvature.
    """
    torch.manual_seed(143)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = attach(model, optimizer)
    parts = [(y < 5).nonzero().squeeze(1), (y >= 5).nonzero().squeeze(1)]
    needed: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for number, part in enumerate(parts):
        for i in draws(len(part), size=32, steps=200, seed=number):
            scores = model(x[part[i]])
            scores = scores[:, 5 * number : 5 * number + 5]  # it is known which part a picture is from
            loss = F.cross_entropy(scores, y[part[i]] - 5 * number)
            for parameter, kept, curvature in needed:
                loss = loss + 20 * (curvature * (parameter - kept) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x[part[i]])
        if number == 0:
            squares = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for j in part[:200].tolist():
                loss = F.cross_entropy(model(x[j, None])[:, :5], y[j, None])
                grads = torch.autograd.grad(loss, list(model.parameters()))
                for square, grad in zip(squares, grads, strict=True):
                    square += grad**2 / 200
            needed = [(p, p.detach().clone(), s) for p, s in zip(model.parameters(), squares, strict=True)]
    with torch.no_grad():
        scores = model(x_test)
        for number, known in enumerate((y_test < 5, y_test >= 5)):
            found = scores[known, 5 * number : 5 * number + 5].argmax(1) + 5 * number
            assert (found == y_test[known]).float().mean() > 0.88, number
