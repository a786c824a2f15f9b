"""A frozen teacher with active dropout is reported; averages, backbones and teachers in evaluation mode are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import MODE_TEACHER


def network(rate, outputs=3):
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(rate), nn.Linear(24, outputs))


def distill(
    *, rate=0.3, mode=True, call=lambda teacher, x: teacher(x), view=lambda x: x, move=None, is_inside=False, outputs=3
):
    """Train a student after a teacher, and return the events and the findings.

    Args:
        rate: Rate of the dropout of the teacher.
        mode: Whether the teacher is in training mode.
        call: Calls the teacher with the inputs.
        view: Makes the inputs of the student.
        move: Called with teacher and student after each update.
        is_inside: Whether the teacher is a part of the watched model.
        outputs: Number of outputs of the teacher.
    """
    torch.manual_seed(0)
    teacher, student = network(rate, outputs).requires_grad_(False), network(0.0)
    model = nn.ModuleDict({"teacher": teacher, "student": student}) if is_inside else student
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        teacher.train(mode)
        for _ in range(40):
            x = torch.randn(32, 6)
            with torch.no_grad():
                wanted = call(teacher, x)[:, :3].softmax(1)
            loss = F.kl_div(student(view(x)).log_softmax(1), wanted, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if move:
                move(teacher, student)
            monitor.step(loss)
    parts = [*teacher.modules(), *student.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts), "no hook is left"
    return [event.layer for event in monitor.history.events if event.kind == MODE_TEACHER.name], monitor.findings()


@pytest.mark.parametrize(("is_inside", "name"), [(True, "teacher"), (False, None)])
def test_a_frozen_teacher_with_active_dropout_is_reported(is_inside, name):
    events, findings = distill(is_inside=is_inside)

    assert events == [name]
    assert [(finding.kind, finding.layer) for finding in findings] == [("train-eval-mismatch", name)]
    assert "drops features at random" in findings[0].message


def follow(teacher, student):
    with torch.no_grad():
        for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
            kept.lerp_(new, 0.01)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": False}, id="evaluation mode"),
        pytest.param({"rate": 0.0}, id="a rate of 0"),
        pytest.param({"move": follow}, id="mean teacher"),
        pytest.param({"call": lambda teacher, x: (teacher(x) + teacher(x)) / 2}, id="several draws"),
        pytest.param({"view": lambda x: x + 0.1}, id="another view"),
        pytest.param({"outputs": 8}, id="features of another shape"),
        pytest.param({"call": lambda teacher, x: teacher.eval()(x)}, id="a mode that is set for each call"),
    ],
)
def test_others_are_not(options):
    assert distill(**options)[0] == []


class OnBackbone(nn.Module):
    """A trained head on the features of a frozen backbone, whose shape is that of the outputs."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = network(0.3, 6).requires_grad_(False), network(0.0, 6)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


def test_a_frozen_backbone_is_not():
    torch.manual_seed(0)
    model = OnBackbone()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(40):
            x = torch.randn(32, 6)
            loss = F.cross_entropy(model(x), x.argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert not [event for event in monitor.history.events if event.kind == MODE_TEACHER.name]


def test_the_reference_of_a_policy_with_active_dropout_is_a_teacher():
    torch.manual_seed(0)
    policy = network(0.3)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with gradwatch.watch(policy, optimizer, on_finding=None) as monitor:
        for _ in range(40):
            x = torch.randn(32, 6)
            with torch.no_grad():
                before = reference(input=x).log_softmax(1)
            gain = (policy(input=x).log_softmax(1) - before).gather(1, x[:, :3].argmax(1, keepdim=True))
            loss = -F.logsigmoid(gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert [event.kind for event in monitor.history.events if event.kind == MODE_TEACHER.name]
