"""Targets that the last activation cannot give are reported at the second sampled step, and no others."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.events import TARGETS_UNREACHABLE
from gradwatch.probe.batches.output_range import RANGES, OutputRange, range_of, unreachable_share


def events_of(last, *, scale=1.0, shift=0.0, loss_of=F.mse_loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(12):
            x = torch.randn(64, 6)
            loss = loss_of(model(x).squeeze(1), shift + scale * x[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return [event for event in monitor.history.events if event.kind == TARGETS_UNREACHABLE.name]


@pytest.mark.parametrize(
    ("last", "name"), [(nn.ReLU(), "ReLU"), (nn.Sigmoid(), "sigmoid"), (nn.Softplus(), "softplus")]
)
@pytest.mark.parametrize("loss_of", [F.mse_loss, lambda a, b: 0.5 * (a - b).square().sum()])
def test_targets_below_an_activation_are_reported_once(last, name, loss_of):
    (event,) = events_of(last, loss_of=loss_of)
    assert (event.step, event.layer) == (10, "3")
    assert name in event.text
    assert event.values["target"] < -1.5
    assert 0.3 < event.values["share"] < 0.7


def test_targets_above_an_activation_are_reported():
    (event,) = events_of(nn.Tanh(), shift=4.0)
    assert event.values["target"] > 5


@pytest.mark.parametrize(
    ("last", "settings"),
    [
        (nn.Identity(), {}),
        (nn.ELU(), {}),
        (nn.ReLU(), {"shift": 9.0}),
        (nn.Sigmoid(), {"scale": 0.1, "shift": 0.5}),
        (nn.ReLU(), {"loss_of": F.l1_loss}),
    ],
    ids=["no activation", "no bound that matters", "targets above it", "targets within it", "another loss"],
)
def test_other_targets_are_not_reported(last, settings):
    assert not events_of(last, **settings)


@pytest.mark.parametrize("function", [torch.exp, torch.relu, torch.sigmoid, torch.tanh, F.softplus, F.hardsigmoid])
def test_the_range_of_an_activation_is_that_of_its_results(function):
    found = range_of(function(torch.linspace(-40, 40, 801, requires_grad=True)).reshape(3, 267).T)
    results = function(torch.linspace(-40, 40, 801))
    assert found in RANGES.values()
    assert results.min() == pytest.approx(found.least, abs=1e-6)
    assert results.max() == pytest.approx(found.most, abs=1e-6) or math.isinf(found.most)


def test_the_share_is_what_the_best_output_leaves():
    targets = np.array([[-1.0], [1.0]])
    assert unreachable_share(targets, OutputRange("ReLU", 0, math.inf)) == 0.5
    assert unreachable_share(targets, OutputRange("tanh", -1, 1)) == 0
    assert unreachable_share(np.ones((4, 1)), OutputRange("tanh", -1, 0)) == 0, "targets without a variance"
