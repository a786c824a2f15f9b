"""In somebody's own loop, an incident holds what its step began with, so that the step can be made again by hand."""

import copy

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.incident import StepRecord
from gradwatch.replay.incident import incidents
from gradwatch.state.rng import set_random_state

SICK = 12
pytestmark = pytest.mark.filterwarnings("ignore:gradwatch")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1))


def loop(directory, *, record, steps=16):
    """Train with a NaN in the batch of one step; return the loss of each and the weights before each."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, before = [], []
    with gradwatch.watch(model, optimizer, run=directory, record=record) as monitor:
        for step in range(steps):
            inputs = torch.randn(8, 6)
            targets = torch.randn(8, 1) * (float("inf") if step == SICK else 1)
            before.append(copy.deepcopy(model.state_dict()))
            torch.rand(3)  # whatever the loop draws before the forward pass
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=inputs)
            losses.append((loss.detach().clone(), inputs, targets))
    return losses, before


def test_an_incident_holds_batch_random_states_and_the_weights_before_the_update(tmp_path):
    losses, before = loop(tmp_path / "run", record=True)

    (incident,) = [one for one in incidents(tmp_path / "run") if one.step == SICK]
    state = incident.state()
    assert incident.snapshot_step == SICK
    assert all(torch.equal(value, before[SICK][name]) for name, value in state["snapshot"]["model"][""].items())
    assert torch.equal(state["window"]["inputs"][0], losses[SICK][1])
    assert "exp_avg" in state["snapshot"]["optimizer"][0]["state"][0]


def test_from_it_the_forward_pass_comes_out_again_with_the_same_dropout(tmp_path):
    model_outputs = []
    losses, _ = loop(tmp_path / "run", record=True)
    state = incidents(tmp_path / "run")[0].state()

    for _ in range(2):
        model = net()
        model.load_state_dict(state["snapshot"]["model"][""])
        set_random_state(state["random"])
        model_outputs.append(model(*state["window"]["inputs"]))

    again = (model_outputs[0] - losses[SICK][2]).square().mean()
    assert torch.equal(model_outputs[0], model_outputs[1])
    assert torch.equal(again, losses[SICK][0])


def test_a_seldom_copy_says_of_which_step_it_is(tmp_path):
    _, before = loop(tmp_path / "run", record=StepRecord(every=5))

    incident = incidents(tmp_path / "run")[0]
    assert (incident.step, incident.snapshot_step) == (SICK, 10)
    kept = incident.state()["snapshot"]["model"][""]
    assert all(torch.equal(value, before[10][name]) for name, value in kept.items())


def test_the_training_stays_what_it_was_to_the_last_bit(tmp_path):
    torch.manual_seed(1)
    plain, before_plain = loop(tmp_path / "plain", record=False)
    torch.manual_seed(1)
    kept, before_kept = loop(tmp_path / "kept", record=True)

    assert all(torch.equal(a[0], b[0]) for a, b in zip(plain[:SICK], kept[:SICK], strict=True))
    for a, b in zip(before_plain[: SICK + 1], before_kept[: SICK + 1], strict=True):
        assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_nothing_is_written_where_nothing_is_critical(tmp_path):
    loop(tmp_path / "run", record=True, steps=SICK)

    assert incidents(tmp_path / "run") == ()


def test_without_a_run_directory_it_is_a_mistake():
    model = net()

    with pytest.raises(GradwatchError, match=r"record: .*give run="):
        gradwatch.watch(model, torch.optim.SGD(model.parameters()), record=True)


def test_a_training_too_large_for_the_memory_is_reported_and_the_batch_still_written(tmp_path):
    model = nn.Linear(1024, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run", record=StepRecord(memory_mb=1)) as monitor:
        for step in range(4):
            loss = model(torch.randn(4, 1024)).square().mean() * (float("nan") if step == 2 else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)

    (incident,) = incidents(tmp_path / "run")
    assert incident.snapshot_step is None
    assert incident.state()["window"]["inputs"][0].shape == (4, 1024)
    assert any("memory_mb allows 1" in event.text for event in gradwatch.load_run(tmp_path / "run").events)


def test_a_copy_of_a_watched_model_keeps_nothing(tmp_path):
    model = net()
    with gradwatch.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "run", record=True):
        twin = copy.deepcopy(model)

    assert torch.isfinite(twin(torch.randn(4, 6))).all()
