"""Weights that nothing moves are reported once, after 40 steps without an update."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import WEIGHTS_STILL


def trained(*, update=lambda model, optimizer: None, steps=60, optimizer_of=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(steps):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            if step >= 5:
                update(model, optimizer)
            monitor.step(loss)
    events = [event for event in monitor.history.events if event.kind == WEIGHTS_STILL.name]
    return events, [(finding.kind, finding.onset) for finding in monitor.findings()]


def step_by_hand(model, optimizer):
    for param in model.parameters():
        param.data -= 0.01 * param.grad  # changes no version


def step_of_another(model, optimizer):
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def test_an_optimizer_that_makes_no_step_is_reported_once():
    events, findings = trained()
    assert [event.step for event in events] == [40]
    assert findings == [("not-optimized", 0)]


def test_one_matrix_that_the_loop_normalizes_does_not_hide_the_missing_step():
    def normalize(model, optimizer):
        with torch.no_grad():
            model[2].weight.copy_(F.normalize(model[2].weight, dim=0))

    events, findings = trained(update=normalize)
    assert [event.values for event in events] == [{"still": 3, "held": 4, "steps": 41}]
    assert "not-optimized" in dict(findings)


@pytest.mark.parametrize("update", [lambda model, optimizer: optimizer.step(), step_by_hand, step_of_another])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.Adam])
def test_weights_that_move_are_not_reported(update, optimizer_of):
    events, findings = trained(update=update, optimizer_of=optimizer_of)
    assert not events
    assert "not-optimized" not in dict(findings)


def test_a_short_run_is_not_judged():
    assert trained(steps=40) == ([], [])
