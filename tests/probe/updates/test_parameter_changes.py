"""Parameters that join the model, leave it or leave their optimizer are found by identity."""

import pytest
import torch
from torch import nn

from gradwatch.events import PARAMETERS_LEFT, PARAMETERS_NEW
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


def test_a_new_parameter_without_a_gradient_is_not_found():
    def average(model, optimizer):
        model[1].register_module("copy", nn.Linear(8, 8))

    assert observed(average) == []


@pytest.mark.parametrize(
    ("change", "text", "tensors"),
    [
        (new_head, "no longer in the model, but still in an optimizer: `2.weight` and 1 more", 2),
        (parametrized, "no longer in the model, but still in an optimizer: `0.weight`", 1),
        (lambda model, optimizer: optimizer.param_groups[0]["params"].pop(), "no longer in any optimizer: `2.bias`", 1),
    ],
)
def test_a_parameter_that_has_left_is_told_once(change, text, tensors):
    (left,) = [o for o in observed(change) if o.kind == PARAMETERS_LEFT.name]

    assert left.text == text
    assert left.values == {"tensors": tensors}


def test_a_parameter_of_another_shape_is_told():
    model, optimizer = make()
    changes = ParameterChanges(model, *list_parameters(model, optimizer), [optimizer])
    model[2].weight.data = torch.ones(5, 8)

    (resized,) = changes.find(1)

    assert resized.text == "in another shape than at the start: `2.weight`"
    assert [*changes.find(10)] == []


def test_a_tied_weight_and_an_unchanged_model_are_no_change():
    assert observed(lambda model, optimizer: None) == []
    assert observed(lambda model, optimizer: model[2].register_parameter("tied", model[0].weight)) == []
