"""Teachers and averages: a teacher that is the student, an average that lags, soft targets, and margins of angles."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case


def cnn(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, out),
    )


def view(pictures: Tensor) -> Tensor:
    """Return pictures with a shift of at most one pixel, another brightness and noise."""
    row, column = (torch.arange(8) + torch.randint(0, 3, (len(pictures), 1)) for _ in range(2))
    cut = F.pad(pictures, (1, 1, 1, 1))[torch.arange(len(pictures))[:, None, None], 0, row[:, :, None], column[:, None]]
    return cut[:, None] * (0.8 + 0.4 * torch.rand(len(pictures), 1, 1, 1)) + 0.1 * torch.randn(len(pictures), 1, 8, 8)


# ------------------------------------------------------------------------------------ a teacher that is the student


class SelfTaught(nn.Module):
    """A student that predicts what a teacher, which is its average, says of another view (Grill et al. 2020)."""

    def __init__(self, backbone: nn.Module, *, copies: bool) -> None:
        super().__init__()
        self.student_backbone = backbone
        self.student_head = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.teacher_backbone = copy.deepcopy(backbone) if copies else backbone
        self.teacher_head = copy.deepcopy(self.student_head)
        self.teacher_backbone.requires_grad_(False)
        self.teacher_head.requires_grad_(False)

    def follow(self, momentum: float = 0.98) -> None:
        """Move the teacher towards the student."""
        parts = (self.student_backbone, self.teacher_backbone), (self.student_head, self.teacher_head)
        with torch.no_grad():
            for student, teacher in parts:
                for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                    theirs.lerp_(ours, 1 - momentum)


def train_without_labels(attach: Attach, *, copies: bool) -> float:
    """Return the change of the weights of the student, in units of their norm."""
    torch.manual_seed(741)
    x, _, _, _ = digits()
    model = SelfTaught(cnn(16, 32), copies=copies)
    before = torch.cat([p.detach().flatten() for p in model.student_backbone.parameters()])
    students = [*model.student_backbone.parameters(), *model.student_head.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.Adam(students, lr=2e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=250):
        one, other = view(x[i]), view(x[i])
        with torch.no_grad():
            taught = model.teacher_head(model.teacher_backbone(one))
        said = model.predictor(model.student_head(model.student_backbone(other)))
        loss = 2 - 2 * F.cosine_similarity(said, taught).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        monitor.step(loss, batch=other)
    after = torch.cat([p.detach().flatten() for p in model.student_backbone.parameters()])
    return ((after - before).norm() / before.norm()).item()


@case(
    fault="no-gradient",
    also=("not-optimized", "dead-layer"),
    layers=("student_backbone", "teacher_backbone"),
    onset=0,
    source="https://github.com/facebookresearch/dinov2/issues/407",
    tags=("self-supervised", "teacher"),
)
def teacher_that_is_the_student(attach: Attach) -> None:
    """The backbones of student and teacher are one object, as it was assigned to both names and not copied. The teacher
    is frozen, and the student with it: only what comes after its backbone learns.
    """
    train_without_labels(attach, copies=False)


@case(source="the repaired twin of `teacher_that_is_the_student`", tags=("self-supervised", "teacher", "twin"))
def teacher_that_is_a_copy(attach: Attach) -> None:
    """The teacher is a copy, and the weights of the student change by more than a tenth of their norm."""
    assert train_without_labels(attach, copies=True) > 0.1


# ------------------------------------------------------------------------------------ an average that lags


@case(
    fault="train-eval-mismatch",
    also=("overfitting", "not-optimized"),
    onset=29,
    source="https://github.com/huggingface/pytorch-image-models/issues/1182",
    tags=("cnn", "average"),
)
def average_that_lags(attach: Attach) -> None:
    """The average of the weights has a decay of 0.9999 and starts at the first weights, and there are 300 steps. The
    model that is evaluated consists of 97 % of weights that were drawn, and knows nothing.
    """
    torch.manual_seed(742)
    x, y, x_test, y_test = digits()
    model = cnn(16, 10)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=300)):
        loss = criterion(model(view(x[i])), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for theirs, ours in zip(average.parameters(), model.parameters(), strict=True):
            theirs.mul_(0.9999).add_(ours.detach(), alpha=1e-4)
        val_loss = criterion(average(x_test), y_test).item() if step % 30 == 29 else None
        monitor.step(loss, batch=x[i], val_loss=val_loss)


# ------------------------------------------------------------------------------------ soft targets without their scale


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    onset=0,
    source="https://github.com/IntelLabs/distiller/issues/122",
    tags=("distillation", "loss"),
)
def soft_targets_without_their_scale(attach: Attach) -> None:
    """A student learns from the softened outputs of a teacher, at a temperature of 10. Their loss is not multiplied by
    the square of it, so that the teacher counts for a hundredth of what was meant.
    """
    torch.manual_seed(743)
    x, y, _, _ = digits()
    teacher = cnn(24, 10)
    teaching = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for i in draws(len(x), size=32, steps=250):
        teaching.zero_grad()
        F.cross_entropy(teacher(view(x[i])), y[i]).backward()
        teaching.step()
    teacher.requires_grad_(False)
    student = cnn(4, 10)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
    monitor = attach(student, optimizer)
    for i in draws(len(x), size=32, steps=300, seed=1):
        pictures = view(x[i])
        said, taught = student(pictures), teacher(pictures)
        soft = F.kl_div((said / 10).log_softmax(1), (taught / 10).softmax(1), reduction="batchmean")
        loss = 0.9 * soft + 0.1 * F.cross_entropy(said, y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures)


# ------------------------------------------------------------------------------------ margins of angles


class Margin(nn.Module):
    """Cosines of the angles to the center of each class; that to the right one is widened (Deng et al. 2019)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(0.1 * torch.randn(classes, width))

    def forward(self, vectors: Tensor, labels: Tensor, *, scale: float = 64, margin: float = 0.5) -> Tensor:
        cosines = F.normalize(vectors, dim=1) @ F.normalize(self.centers, dim=1).T
        right = F.one_hot(labels, len(self.centers)).bool()
        widened = (cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos() + margin).cos()
        # beyond pi, the cosine would rise again
        widened = torch.where(cosines > -math.cos(margin), widened, cosines - margin * math.sin(margin))
        return F.cross_entropy(scale * torch.where(right, widened, cosines), labels)


def train_angles(attach: Attach, *, lr: float) -> float:
    """Return the share of new digits that are nearest to the center of their class."""
    torch.manual_seed(744)
    x, y, x_test, y_test = digits()
    vectors, margin = cnn(16, 32), Margin(32, 10)
    model = nn.ModuleDict({"vectors": vectors, "margin": margin})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=300):
        loss = margin(vectors(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        near = F.normalize(vectors(x_test), dim=1) @ F.normalize(margin.centers, dim=1).T
    return (near.argmax(1) == y_test).float().mean().item()


@case(
    fault="learning-rate-too-high",
    also=("loss-plateau", "dead-relu", "dead-layer", "rising-sparsity", "exploding-gradient", "vanishing-gradient"),
    tolerate=("gradient-spike", "poor-initialization", "no-gradient", "layer-imbalance", "oscillating-gradient"),
    onset=0,
    source="https://github.com/auroua/InsightFace_TF/issues/42",
    tags=("metric", "rate"),
)
def margins_at_a_large_rate(attach: Attach) -> None:
    """Vectors are to be near the center of their class by a margin, with cosines times 64, at a rate of 0.1 in small
    batches. The loss stays above 17, and three of four new digits are misread.
    """
    train_angles(attach, lr=0.1)


@case(source="the repaired twin of `margins_at_a_large_rate`", tags=("metric", "rate", "twin"))
def margins_at_a_small_rate(attach: Attach) -> None:
    """At a rate of 0.001, more than 90 % of new digits are nearest to their center."""
    assert train_angles(attach, lr=0.001) > 0.9
