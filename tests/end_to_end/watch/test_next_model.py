"""A loop that goes on with a new model, layer or optimizer is told that nobody watches it."""

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.records import Severity


def make():
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, monitor, *, steps):
    for _ in range(steps):
        x = torch.randn(32, 6)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


def problems(monitor):
    return [f for f in monitor.findings() if f.severity > Severity.INFO]


def test_a_second_model_under_the_monitor_of_the_first_is_found():
    torch.manual_seed(0)
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        train(model, optimizer, monitor, steps=20)
        train(*make(), monitor, steps=80)

    (finding,) = problems(monitor)
    (diagnosis,) = monitor.close()
    assert not monitor.history.withdrawn
    assert (finding.kind, finding.onset) == ("not-optimized", 20)
    assert diagnosis.cause_id == "another-model"
    assert "gradwatch.watch(model, optimizer)" in diagnosis.remedies[0].code


def test_the_finding_is_withdrawn_when_the_first_model_is_trained_again():
    torch.manual_seed(0)
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        train(model, optimizer, monitor, steps=20)
        train(*make(), monitor, steps=80)
        train(model, optimizer, monitor, steps=40)

    assert problems(monitor) == []
    assert [(f.withdrawn, f.ended) for f in monitor.history.withdrawn] == [(100, 100)]


def test_a_monitor_for_each_model_reports_nothing():
    torch.manual_seed(0)
    for _ in range(2):
        model, optimizer = make()
        with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
            train(model, optimizer, monitor, steps=60)
        assert problems(monitor) == []


@pytest.mark.parametrize("is_held", [True, False])
def test_a_new_layer_that_is_trained_is_said_not_to_be_checked(is_held):
    torch.manual_seed(0)
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        train(model, optimizer, monitor, steps=20)
        model[2] = nn.Linear(16, 1)
        if is_held:
            optimizer.add_param_group({"params": model[2].parameters()})
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        train(model, optimizer, monitor, steps=60)

    assert "not checked: `2.weight` and 1 more joined the model and an optimizer after `watch`" in str(monitor)


@pytest.mark.filterwarnings("ignore:gradwatch")
def test_accumulation_over_many_calls_is_not_reported():
    torch.manual_seed(0)
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(120):
            x = torch.randn(32, 6)
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            if step % 50 == 0:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss, batch=x)

    assert problems(monitor) == []
