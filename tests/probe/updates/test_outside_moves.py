"""Weights that no watched optimizer holds: what moves them is seen, however it does, and what never moves is found."""

import copy

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.probe.parameters import list_parameters
from gradwatch.probe.updates.outside_moves import OutsideMoves, fingerprints


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def train(model, held, move, *, steps=40, dtype=torch.float32, before=None):
    """Train what is held with a watched optimizer, and move the rest by a function that comes after the watched step.

    Args:
        held: Modules of the watched optimizer.
        move: Called at the end of each iteration, after `monitor.step`, with the model and the step.
        before: Called before each forward pass.

    Returns:
        Layer, step and severity of each finding that something is not optimized.
    """
    optimizer = torch.optim.SGD([p for module in held for p in module.parameters()], lr=0.05)
    with gradwatch.watch(model, optimizer) as monitor:
        for step in range(steps):
            if before:
                before(model, step)
            x = torch.randn(16, 8, dtype=dtype)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
            move(model, step)
            model.zero_grad()
    return [(f.layer, f.step, str(f.severity)) for f in monitor.findings() if f.kind == "not-optimized"]


def by_another_optimizer(model):
    others = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    return lambda model, step: others.step()


def by_hand(model):
    def move(model, step):
        for param in model[2].parameters():
            param.data.add_(param.grad, alpha=-1e-3)

    return move


def by_replacing_their_data(model):
    def move(model, step):
        for param in model[2].parameters():
            param.data = param.data - 1e-3 * param.grad

    return move


def as_an_average(model):
    fast = copy.deepcopy(model[2])

    def move(model, step):
        for slow, param in zip(model[2].parameters(), fast.parameters(), strict=True):
            param.data.sub_(slow.grad, alpha=1e-2)
            slow.data.lerp_(param.data, 0.01)

    return move


def now_and_then(model):
    others = torch.optim.SGD(model[2].parameters(), lr=1e-6)
    return lambda model, step: others.step() if step % 4 == 3 else None


@pytest.mark.parametrize("way", [by_another_optimizer, by_hand, by_replacing_their_data, as_an_average, now_and_then])
def test_what_something_else_moves_is_not_reported(way):
    model = make()

    assert train(model, [model[0], model[4]], way(model)) == []


def by_a_master_copy(model):
    """Keep all weights in float32 elsewhere, and copy them back: in bfloat16 most steps change nothing."""
    masters = [param.detach().float() for param in model.parameters()]

    def move(model, step):
        for param, master in zip(model.parameters(), masters, strict=True):
            master.sub_(param.grad.float(), alpha=1e-2)
            param.data.copy_(master)

    return move


def test_a_model_that_a_master_copy_moves_is_not_reported():
    model = make(torch.bfloat16)
    other = nn.Linear(1, 1)  # what the watched optimizer holds is no part of the model

    assert train(model, [other], by_a_master_copy(model), dtype=torch.bfloat16) == []


def test_a_model_of_which_no_optimizer_holds_anything_is_not_reported_where_a_loop_moves_it():
    model = make()

    def move(model, step):
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad

    assert train(model, [nn.Linear(1, 1)], move) == []
    assert train(make(), [nn.Linear(1, 1)], lambda *_: None) == [(None, 10, "critical")]


def test_what_never_moves_is_found_beside_what_something_else_moves():
    model = make()
    others = torch.optim.SGD(model[4].parameters(), lr=0.05)

    assert train(model, [model[0]], lambda *_: others.step()) == [("2", 10, "warning")]


def test_a_layer_that_thaws_and_is_moved_by_another_optimizer_is_not_reported():
    model = make()
    model[0].requires_grad_(False)
    others = torch.optim.SGD(model[0].parameters(), lr=0.05)

    def thaw(model, step):
        model[0].requires_grad_(step >= 15)

    def move(model, step):
        if step >= 15:
            others.step()

    assert train(model, [model[2], model[4]], move, before=thaw) == []
    model = make()
    model[0].requires_grad_(False)
    assert [f[0] for f in train(model, [model[2], model[4]], lambda *_: None, before=thaw)] == ["0"]


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_what_an_optimizer_holds_and_the_loop_moves_is_not_reported(rate):
    """An optimizer whose step leaves a group out, or has a rate of zero for it, and a loop that moves it by hand."""
    model = make()
    held = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rate}], lr=0.05)
    with gradwatch.watch(model, held) as monitor:
        for _ in range(60):
            x = torch.randn(16, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            own = [param.grad for param in model[2].parameters()]
            if rate:
                before = [param.detach().clone() for param in model[2].parameters()]
            held.step()
            if rate:  # what the step did is taken back, as by a loop that has its own rule
                for param, old in zip(model[2].parameters(), before, strict=True):
                    param.data.copy_(old)
            monitor.step(loss)
            for param, grad in zip(model[2].parameters(), own, strict=True):
                param.data.sub_(grad, alpha=0.05)
            model.zero_grad()

    assert [f.layer for f in monitor.findings() if f.kind == "not-optimized"] == ["4"]


def events(moves, steps, move):
    said = []
    for step in steps:
        move(step)
        said += [(step, layer, values) for _, layer, _, values in moves.find(step)]
    return said


def test_a_stretch_that_has_moved_is_reported_once():
    model = make()
    params, layers = list_parameters(model)

    def move(step):
        with torch.no_grad():
            for param in params[:3] if step else ():
                param.add_(1e-7)

    said = events(OutsideMoves(params, layers), range(30), move)

    assert said == [(1, "0.weight", {"first": 0.0, "last": 2.0})]


def test_what_an_optimizer_holds_is_not_looked_at():
    model = make()
    params, layers = list_parameters(model, torch.optim.SGD(model.parameters()))

    assert events(OutsideMoves(params, layers), range(30), lambda _: params[0].data.add_(1)) == []


def test_one_number_of_many_changes_a_fingerprint():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        param = torch.randn(300, 300, dtype=dtype)
        before = fingerprints([param])
        assert fingerprints([param]) == before
        param[7, 3] *= 1.01
        assert fingerprints([param]) != before


def test_a_weight_that_is_nan_stays_what_it_is():
    param = torch.full((3,), torch.nan)

    assert fingerprints([param]) == fingerprints([param])
