"""Weights that a loop clips are found, and those that it does not clip are not."""

import pytest
import torch
from torch import nn

from gradwatch.probe.device.sync import Arrival
from gradwatch.probe.parameters import list_parameters
from gradwatch.probe.updates.clipped_weights import FIRST_LOOK, ClippedWeights


def found(change, *, steps=100):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    reader = ClippedWeights(*list_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    reader.begin()
    observations = []
    for step in range(steps):
        with torch.no_grad():
            for param in model.parameters():
                change(param)
        observations += [(step, it.layer, dict(it.values)) for it in reader.find(step)]
    return observations


def test_weights_that_are_clipped_after_each_update_are_reported_once():
    def change(param):
        param.add_(0.05 * torch.randn_like(param)).clamp_(-0.1, 0.1)

    assert found(change) == [
        (FIRST_LOOK, "0.weight", {"first": 0, "last": 0}),
        (FIRST_LOOK, "1.weight", {"first": 2, "last": 2}),
    ]


def test_shares_that_arrive_late_are_judged_when_they_are_there(monkeypatch):
    step = iter(range(100))
    monkeypatch.setattr(Arrival, "is_ready", property(lambda _: next(step) == 3))

    observations = found(lambda param: param.add_(0.05 * torch.randn_like(param)).clamp_(-0.1, 0.1), steps=30)

    assert [(step, name) for step, name, _ in observations] == [
        (FIRST_LOOK + 3, "0.weight"),
        (FIRST_LOOK + 3, "1.weight"),
    ]


def test_weights_that_are_made_of_two_values_are_not():
    model = nn.Linear(16, 16)
    nn.init.eye_(model.weight)
    reader = ClippedWeights(*list_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    reader.begin()

    assert [*reader.find(FIRST_LOOK)] == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.add_(0.05 * torch.randn_like(p)), id="free weights"),
        pytest.param(lambda p: p.fill_(0.3), id="constant weights"),
        pytest.param(lambda p: p.add_(0.05 * torch.randn_like(p)).mul_(p.abs() > 0.2), id="pruned weights"),
        pytest.param(lambda p: p.fill_(float("nan")), id="nan"),
    ],
)
def test_other_weights_are_not(change):
    assert found(change) == []
