"""Multipliers that are moved up the gradient are told from weights that are moved down."""

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.events import ASCENDED


def events_of(optimizers, model):
    with gradwatch.watch(model, optimizers) as watcher:
        (model["solution"].weight.sum() * model["multiplier"].weight.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        watcher.step(1.0)
    return [event.layer for event in watcher.history.events if event.kind == ASCENDED.name]


@pytest.fixture
def model():
    return nn.ModuleDict({"solution": nn.Linear(3, 3, bias=False), "multiplier": nn.Linear(2, 1, bias=False)})


def test_the_multipliers_of_a_saddle_point_are_named(model):
    down = torch.optim.SGD(model["solution"].parameters(), lr=0.1)
    up = torch.optim.SGD(model["multiplier"].parameters(), lr=0.1, maximize=True)

    assert events_of([down, up], model) == ["multiplier.weight"]


def test_an_objective_that_is_maximized_as_a_whole_has_no_multipliers(model):
    assert events_of([torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)], model) == []
