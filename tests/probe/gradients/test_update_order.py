"""A wrong order of backward passes, clipping, updates and clearing is reported; any right one is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gradwatch
from gradwatch.events import CLEARED_EARLY, CLIPPED_LATE, GRADIENTS_REUSED
from gradwatch.probe.gradients.clip_calls import CLIP_LISTENERS

KINDS = {kind.name for kind in (CLIPPED_LATE, GRADIENTS_REUSED, CLEARED_EARLY)}


def trained(update, *, build=torch.optim.SGD, steps=40):
    """Train with `update(loss, model, optimizer)`; return the events about the order, and the findings by kind."""
    torch.manual_seed(0)
    before = [len(listeners._references) for listeners in CLIP_LISTENERS]  # of earlier tests
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = build(model.parameters(), lr=0.05)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            x = torch.randn(32, 6)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            update(loss, model, optimizer)
            monitor.step(loss)
    assert [len(listeners._references) for listeners in CLIP_LISTENERS] == before, "no listener is left"
    assert not any(param._backward_hooks for param in model.parameters()), "no hook is left"
    events = [event for event in monitor.history.events if event.kind in KINDS]
    return events, {finding.kind: finding for finding in monitor.findings()}, monitor.close()


def in_order(*calls):
    """Return an update that makes calls in an order, by their names."""

    def update(loss, model, optimizer):
        for call in calls:
            match call:
                case "backward":
                    loss.backward(retain_graph=True)
                case "step":
                    optimizer.step()
                case "clear":
                    optimizer.zero_grad()
                case "zero":
                    optimizer.zero_grad(set_to_none=False)
                case "values":
                    clip_grad_value_(model.parameters(), 0.01)
                case limit:
                    clip_grad_norm_(model.parameters(), limit)

    return update


@pytest.mark.parametrize(
    "calls",
    [
        ("backward", "step", 0.1, "clear"),
        ("backward", "step", 0.1, "zero"),
        ("clear", "backward", "step", 0.1),
        ("clear", "backward", "step", "values"),
    ],
)
def test_clipping_after_the_update_is_reported(calls):
    events, findings, diagnoses = trained(in_order(*calls))

    assert [event.kind for event in events] == [CLIPPED_LATE.name]
    assert "clipped after the update" in findings["learning-rate-too-high"].message
    assert diagnoses[0].cause_id == "clip-after-update"


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_two_updates_with_one_gradient_are_reported(build):
    events, findings, diagnoses = trained(in_order("clear", "backward", "step", "step"), build=build)

    assert [event.kind for event in events] == [GRADIENTS_REUSED.name]
    assert set(findings) == {"missing-zero-grad"}
    assert diagnoses[0].cause_id == "update-twice"


@pytest.mark.parametrize("calls", [("backward", "clear", "step"), ("clear", "step", "backward")])
def test_clearing_before_the_update_is_the_cause_of_a_missing_gradient(calls):
    events, findings, diagnoses = trained(in_order(*calls))

    assert [event.kind for event in events] == [CLEARED_EARLY.name]
    assert "no-gradient" in findings
    assert diagnoses[0].cause_id == "cleared-before-update"


@pytest.mark.parametrize(
    "calls",
    [
        ("clear", "backward", "step"),
        ("backward", 0.1, "step", "clear"),
        ("backward", "values", "step", "zero"),
        ("clear", "backward", "backward", 0.1, "step"),
        ("clear", "backward", 0.1, "step", 0.1),
        ("clear", "backward", "step", "clear", "step"),
    ],
)
def test_a_right_order_is_not(calls):
    events, findings, _ = trained(in_order(*calls))

    assert events == []
    assert findings == {}


def test_a_norm_that_is_taken_after_the_update_is_no_finding():
    _, findings, _ = trained(in_order("clear", "backward", "step", float("inf")))

    assert findings == {}


def test_a_closure_that_clears_is_not_reported():
    def update(loss, model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()

    assert trained(update)[0] == []


def test_a_loop_that_moves_the_weights_by_hand_is_not_reported():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    with gradwatch.watch(model, [], on_finding=None) as monitor:
        for _ in range(20):
            x = torch.randn(32, 6)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
            monitor.step(loss)

    assert not KINDS & {event.kind for event in monitor.history.events}
