"""Optimizers that are built for one update each are reported once; new ones for each stage or task are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gradwatch
from gradwatch.events import OPTIMIZER_REBUILT


def trained(update, *, steps=60):
    """Train with `update(step, model, optimizer)`, and return the reported numbers of updates and the findings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(steps):
            x = torch.randn(32, 6)
            model.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            update(step, model, optimizer)
            monitor.step(loss)
    assert not _global_optimizer_pre_hooks, "no hook is left"
    events = [event for event in monitor.history.events if event.kind == OPTIMIZER_REBUILT.name]
    return [event.values["updates"] for event in events], [finding.kind for finding in monitor.findings()]


@pytest.mark.parametrize(
    "build",
    [torch.optim.Adam, torch.optim.RMSprop, lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)],
)
def test_a_new_optimizer_for_each_update_is_reported(build):
    events, findings = trained(lambda step, model, _: build(model.parameters()).step())

    assert events == [20]
    assert "not-optimized" in findings


class Stages:
    """A new optimizer every `every` updates."""

    def __init__(self, every):
        self.every = every

    def __call__(self, step, model, optimizer):
        if step % self.every == 0:
            self.optimizer = torch.optim.Adam(model.parameters())
        self.optimizer.step()


def of_a_head(step, model, optimizer):
    optimizer.step()
    torch.optim.Adam(model[2].parameters()).step()


def of_copies(step, model, optimizer):
    optimizer.step()
    torch.optim.Adam([param.detach().clone().requires_grad_() for param in model.parameters()]).step()


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(lambda step, model, optimizer: optimizer.step(), id="one for the whole run"),
        pytest.param(lambda step, model, _: torch.optim.SGD(model.parameters(), lr=0.01).step(), id="without memory"),
        pytest.param(Stages(every=2), id="two updates each"),
        pytest.param(of_a_head, id="beside the watched one"),
        pytest.param(of_copies, id="for copies of the weights"),
    ],
)
def test_others_are_not(update):
    assert trained(update) == ([], [])
