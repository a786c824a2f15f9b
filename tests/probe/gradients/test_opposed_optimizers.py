"""Two optimizers that undo each other on the same weights are reported; others that share weights are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import OPTIMIZERS_OPPOSED


def trained(of_generator, *, steps=200, maximize=False):
    """Train a GAN, with the modules that the generator's optimizer holds by name; return the events and findings."""
    torch.manual_seed(0)
    parts = {
        "generator": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)),
        "judge": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    }
    model = nn.ModuleDict(parts)
    params = [param for name in of_generator for param in parts[name].parameters()]
    first = torch.optim.Adam(params, lr=1e-3, maximize=maximize)
    second = torch.optim.Adam(parts["judge"].parameters(), lr=1e-3)
    with gradwatch.watch(model, [first, second], on_finding=None) as monitor:
        for _ in range(steps):
            fake = parts["generator"](torch.randn(32, 4))
            real = 2 + 0.1 * torch.randn(32, 2)
            judged = parts["judge"](fake.detach())
            loss = F.softplus(-parts["judge"](real)).mean() + F.softplus(judged).mean()
            model.zero_grad()
            loss.backward()
            second.step()
            model.zero_grad()
            F.softplus(-parts["judge"](fake)).mean().mul(-1 if maximize else 1).backward()
            first.step()
            monitor.step(loss)
    events = [event for event in monitor.history.events if event.kind == OPTIMIZERS_OPPOSED.name]
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in (first, second)), "no hook is left"
    return events, [finding for finding in monitor.findings() if "opposite directions" in finding.message]


def test_a_judge_in_both_optimizers_is_reported():
    events, findings = trained(["generator", "judge"])

    assert [event.layer for event in events] == ["judge"]
    assert events[0].values["cosine"] <= -0.8
    assert [(finding.kind, finding.layer) for finding in findings] == [("oscillating-gradient", "judge")]


def test_a_judge_of_its_own_is_not():
    assert trained(["generator"]) == ([], [])


def test_an_ascent_on_purpose_is_not():
    assert trained(["generator", "judge"], maximize=True) == ([], [])


@pytest.mark.parametrize("sign", [1, -1])
def test_an_encoder_that_two_tasks_share_is_not(sign):
    torch.manual_seed(0)
    parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("encoder", "first", "second")})
    optimizers = [
        torch.optim.Adam([*parts["encoder"].parameters(), *parts[n].parameters()]) for n in ("first", "second")
    ]
    with gradwatch.watch(parts, optimizers, on_finding=None) as monitor:
        for _ in range(100):
            x = torch.randn(32, 8)
            for name, optimizer, target in zip(("first", "second"), optimizers, (x, sign * x.flip(1)), strict=True):
                loss = F.mse_loss(parts[name](parts["encoder"](x).relu()), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            monitor.step(loss)

    assert OPTIMIZERS_OPPOSED.name not in {event.kind for event in monitor.history.events}
