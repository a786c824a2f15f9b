"""Attributes that should freeze weights or lower a rate, and that torch does not read, are reported."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import FREEZE_IGNORED, RATE_IGNORED


def trained(prepare, *, at=None, steps=60):
    """Train with `prepare(model, optimizer)`, before the monitor or at a step; return texts of events and findings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if at is None:
        prepare(model, optimizer)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(steps):
            if step == at:
                prepare(model, optimizer)
            x = torch.randn(32, 6)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    kinds = {FREEZE_IGNORED.name, RATE_IGNORED.name}
    found = [event.text for event in monitor.history.events if event.kind in kinds]
    return found, [finding.kind for finding in monitor.findings()]


def set_on_parameters(name, value=False):
    def prepare(model, _):
        for param in model[0].parameters():
            setattr(param, name, value)

    return prepare


def set_on_module(name):
    return lambda model, _: setattr(model[0], name, False)


@pytest.mark.parametrize(
    ("prepare", "name"),
    [
        (set_on_parameters("require_grad"), "require_grad"),
        (set_on_parameters("requires_gradient"), "requires_gradient"),
        (set_on_module("requires_grad"), "requires_grad"),
        (set_on_module("require_grad"), "require_grad"),
    ],
)
def test_a_freeze_without_effect_is_reported(prepare, name):
    text = f"2 tensors train although `{name}` is set to False for them: torch does not read it there"

    assert trained(prepare) == ([text], ["learning-rate-too-high"])


@pytest.mark.parametrize(
    "prepare",
    [
        set_on_parameters("requires_grad"),
        set_on_parameters("require_grad", value=True),
        lambda model, _: (set_on_module("requires_grad")(model, _), model[0].requires_grad_(False)),
        lambda model, _: model[0].requires_grad_(False),
    ],
)
def test_a_freeze_with_effect_is_not(prepare):
    assert trained(prepare) == ([], [])


def test_a_rate_on_the_optimizer_is_reported():
    found, findings = trained(lambda _, optimizer: setattr(optimizer, "lr", 1e-3), at=20)

    assert found == ["the learning rate is still 0.01: `optimizer.lr = 0.001` has no effect"]
    assert findings == ["learning-rate-too-high"]


@pytest.mark.parametrize("rate", [1e-2, 0.1, "0.001"])
def test_a_rate_that_is_not_lower_is_not(rate):
    assert trained(lambda _, optimizer: setattr(optimizer, "lr", rate)) == ([], [])
