"""Parameters that join the model are found by identity."""

import pytest
import torch
from torch import nn

from gradwatch.events import PARAMETERS_JOINED, PARAMETERS_NEW
from gradwatch.probe.parameters import list_parameters
from gradwatch.probe.updates.parameter_changes import ParameterChanges


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def new_head(model, optimizer):
    model[2] = nn.Linear(8, 3)


def another_layer(model, optimizer):
    model[1] = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))


def assigned_state(model, optimizer):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def parametrized(model, optimizer):
    nn.utils.parametrizations.weight_norm(model[0])


def adapter(model, optimizer):
    model[0].register_parameter("lora", nn.Parameter(torch.ones(8, 6)))
    model[0].forward = lambda x: x @ (model[0].weight + model[0].lora).T


def observed(change, *, held=False, moves=False, steps=41):
    """Return what is found in a loop that changes its model at step 5."""
    model, optimizer = make()
    params, layers = list_parameters(model, optimizer)
    changes, found, known = ParameterChanges(model, params, layers, [optimizer]), [], set(params)
    for step in range(steps):
        if step == 5:
            change(model, optimizer)
        model.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        added = [p for p in model.parameters() if p not in known]
        if step == 5 and held and added:
            optimizer.add_param_group({"params": added})
        if moves:
            with torch.no_grad():
                for p in added:
                    p.sub_(1e-4 * p.grad)
        found += changes.find(step)
    return found


@pytest.mark.parametrize("change", [new_head, another_layer, assigned_state, parametrized, adapter])
def test_a_new_parameter_that_no_optimizer_holds_is_found_once(change):
    found = [o for o in observed(change) if o.kind == PARAMETERS_NEW.name]

    assert found
    assert len({o.layer for o in found}) == len(found)


@pytest.mark.parametrize("change", [new_head, another_layer, assigned_state, parametrized, adapter])
def test_one_that_an_optimizer_holds_or_other_code_moves_is_not(change):
    for options in ({"held": True}, {"moves": True}):
        assert not [o for o in observed(change, **options) if o.kind == PARAMETERS_NEW.name], options


def test_a_head_that_joins_the_model_and_its_optimizer_is_reported_once():
    found = [o for o in observed(another_layer, held=True) if o.kind == PARAMETERS_JOINED.name]

    assert [(o.values, o.text) for o in found] == [
        (
            {"tensors": 2, "since": 1},
            "`1.1.weight` and 1 more joined the model and an optimizer after `watch`, and are not watched",
        )
    ]


def test_a_new_parameter_without_a_gradient_is_not_found():
    def average(model, optimizer):
        model[1].register_module("copy", nn.Linear(8, 8))

    assert observed(average) == []


def test_a_tied_weight_and_an_unchanged_model_are_no_change():
    assert observed(lambda model, optimizer: None) == []
    assert observed(lambda model, optimizer: model[2].register_parameter("tied", model[0].weight)) == []
