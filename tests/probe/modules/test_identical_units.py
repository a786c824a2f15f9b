"""Weights that are all alike are found where they make copies of units, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.probe.modules.identical_units import find_identical_units
from gradwatch.probe.parameters import list_parameters


def stack(*filled, value=0.05, kind=nn.Linear):
    """Return four layers of which some are filled with one number."""
    torch.manual_seed(0)
    layers = [kind(8, 8) if kind is nn.Linear else kind(8, 8, 1) for _ in range(4)]
    for i in filled:
        nn.init.constant_(layers[i].weight, value)
    return nn.Sequential(*layers)


def found(model):
    return [layer for _, layer, _, _ in find_identical_units(*list_parameters(model))]


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d])
def test_two_in_a_row_make_copies(kind):
    assert found(stack(1, 2, kind=kind)) == ["1", "2"]
    assert found(stack(0, 1, 2, 3, kind=kind)) == ["0", "1", "2", "3"]


def test_one_alone_is_told_apart_by_what_comes_behind():
    assert found(stack(1)) == []
    assert found(stack(0, 2)) == []


def test_zeros_are_a_closed_branch():
    assert found(stack(1, 2, value=0.0)) == []


def test_what_is_frozen_or_drawn_but_for_its_head_is_none():
    assert found(stack(1, 2).requires_grad_(False)) == []
    model = stack(1, 2)
    with torch.no_grad():
        model[1].weight[5, 3] = 1.0
    assert found(model) == [], "one number differs"


def test_units_stay_copies_in_training_and_the_run_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with gradwatch.watch(model, optimizer) as watcher:
        for _ in range(12):
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.arange(16) % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watcher.step(loss)

    weight = model[0].weight.detach()
    assert torch.allclose(weight, weight[:1].expand_as(weight)), "the physics: all units are the same"
    poor = [f for f in watcher.findings() if f.kind == "poor-initialization"]
    assert [(f.layer, f.step, str(f.severity)) for f in poor] == [("0", 0, "warning"), ("2", 0, "warning")]
