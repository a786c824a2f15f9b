"""A model that was trained before its monitor was attached is known by the changes of its weights."""

import torch
from torch import nn

import gradwatch
from gradwatch.events import WEIGHTS_TRAINED

DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model, *, steps, optimizer_of=torch.optim.SGD, **options):
    """Train a model, and return how often its weights had been changed before it was watched."""
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, on_finding=None, **options) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(DATA) - DATA.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return [event.values["changes"] for event in monitor.history.events if event.kind == WEIGHTS_TRAINED.name]


def test_a_second_phase_begins_with_a_trained_model():
    model = make_model()

    assert train(model, steps=100) == []
    assert [changes >= 100 for changes in train(model, steps=2, optimizer_of=torch.optim.Adam)] == [True]


def test_loaded_weights_and_a_few_changes_are_no_training():
    model = make_model()
    train(model, steps=20)
    copied = make_model()
    copied.load_state_dict(model.state_dict())

    assert train(model, steps=2) == []
    assert train(copied, steps=2) == []


def test_a_plateau_of_the_second_phase_is_for_information():
    model = make_model()
    train(model, steps=2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with gradwatch.watch(model, optimizer, on_finding=None, detect={"loss-plateau": {"patience": 40}}) as monitor:
        for _ in range(400):
            optimizer.zero_grad()
            loss = (model(DATA) - DATA.sum(1, keepdim=True)).square().mean() + 5
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert [str(finding.severity) for finding in monitor.findings() if finding.kind == "loss-plateau"] == ["info"]
