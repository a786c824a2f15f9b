"""A state of an earlier step that is still the model's own restores nothing; copies and other loads are no news."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.diagnose.rank import diagnose

STEPS, BEST = 12, 5


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def train(keep, restore, *, models=make):
    """Keep a state at one step, restore it after the training, and return the findings of failed loads."""
    model = models()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = gradwatch.watch(model, optimizer, run=None, on_finding=None)
    kept = None
    for step in range(STEPS):
        loss = functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 3, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == BEST:
            kept = keep(model)
        monitor.step(loss)
    restore(model, kept)
    monitor.close()
    return monitor, [finding for finding in monitor.findings() if finding.kind == "failed-load"]


def load(model, state):
    model.load_state_dict(state)


def test_the_best_state_that_was_not_copied_is_found_with_both_steps():
    monitor, (finding,) = train(nn.Module.state_dict, load)

    assert (finding.since, finding.layer) == (STEPS - 1, None)
    assert f"the state of step {BEST} was not copied" in finding.message
    (diagnosis,) = diagnose(monitor.history)
    assert (diagnosis.cause_id, diagnosis.remedies[0].code) == (
        "state-not-copied",
        "best = copy.deepcopy(model.state_dict())",
    )


def save(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("keep", "restore"),
    [
        (lambda model: copy.deepcopy(model.state_dict()), load),
        (lambda model: {name: value.clone() for name, value in model.state_dict().items()}, load),
        (lambda model: copy.deepcopy(model).state_dict(), load),
        (save, lambda model, saved: load(model, torch.load(io.BytesIO(saved), weights_only=True))),
        (lambda model: None, lambda model, _: load(model, model.state_dict())),
        (lambda model: None, lambda model, _: load(model, make().state_dict())),
        (nn.Module.state_dict, lambda model, state: load(copy.deepcopy(model), state)),
        (nn.Module.state_dict, lambda model, state: load(make(), state)),
        (nn.Module.state_dict, lambda model, state: load(model[0], make()[0].state_dict())),
    ],
)
def test_states_that_restore_something_or_are_new_are_no_news(keep, restore):
    assert train(keep, restore)[1] == []


def test_weights_that_are_swapped_for_an_evaluation_are_lost():
    """As with an average: its weights are loaded, and what was kept of the model is the average now."""

    def swap(model, kept):
        average = {name: value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        model.load_state_dict(kept)

    assert len(train(nn.Module.state_dict, swap)[1]) == 1


def test_only_the_first_such_load_of_a_model_is_told():
    def load_twice(model, kept):
        load(model, kept)
        load(model, kept)

    assert len(train(nn.Module.state_dict, load_twice)[1]) == 1


def test_a_monitor_leaves_no_hook():
    model = make()
    monitor = gradwatch.watch(model, torch.optim.Adam(model.parameters()), run=None)
    assert model._load_state_dict_pre_hooks

    monitor.close()
    assert not model._load_state_dict_pre_hooks
    assert not model._state_dict_hooks
