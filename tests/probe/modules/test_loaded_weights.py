"""A load that matches no parameter is remembered until something else fills the model."""

import gc

import pytest
import torch
from torch import nn

from gradwatch.probe.modules.loaded_weights import FAILED, find_failed_loads, note_load


def make():
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "head": nn.Linear(8, 2)})


def load(module, state):
    keys = module.load_state_dict(state, strict=False)
    note_load(module, missing=keys.missing_keys, unexpected=keys.unexpected_keys)


def renamed(module, *, prefix):
    return {prefix + name: value + 1.0 for name, value in module.state_dict().items()}


def found(models):
    return [(layer, values) for _, layer, _, values in find_failed_loads(models)]


def test_the_load_of_a_model_with_other_names_is_told_with_one_of_each():
    model = make()

    load(model, renamed(model, prefix="module."))

    ((kind, layer, text, values),) = find_failed_loads(model)
    assert (kind, layer, values) == ("weights-not-loaded", None, {"tensors": 9.0})
    assert "module.body.0.weight where the model has body.0.weight" in text


def test_a_part_is_named_by_its_path():
    model = make()

    load(model["body"], {"state": torch.ones(1)})

    assert found(model) == [("body", {"tensors": 1.0})]


@pytest.mark.parametrize("state", [{}, {"head.weight": torch.ones(2, 8)}, {"head.weight": torch.ones(2, 8), "x": 1}])
def test_a_load_that_matches_something_or_holds_nothing_is_no_mistake(state):
    model = make()

    load(model, state)

    assert found(model) == []


def later_load_of_the_same(model):
    load(model, renamed(model, prefix=""))


def later_load_of_a_part(model):
    load(model["head"], renamed(model["head"], prefix=""))


def later_load_of_the_whole(model):
    load(nn.ModuleDict({"all": model}), renamed(nn.ModuleDict({"all": make()}), prefix=""))


def copies_by_hand(model):
    state = model.state_dict()
    for value in state.values():
        value.copy_(torch.ones(()))


def fresh_weights(model):
    nn.init.zeros_(model["head"].weight)


@pytest.mark.parametrize(
    "fill",
    [later_load_of_the_same, later_load_of_a_part, later_load_of_the_whole, copies_by_hand, fresh_weights],
)
def test_what_fills_the_model_later_makes_up_for_it(fill):
    model = make()
    load(model, renamed(model, prefix="module."))

    fill(model)

    assert found(model) == []


def test_a_model_without_parameters_and_one_of_inference_mode_do_not_fail():
    with torch.inference_mode():
        frozen = make()
        for module in (nn.ReLU(), frozen):
            load(module, {"other": torch.ones(1)})

    assert found(nn.ReLU()) == []
    assert found(frozen) == [(None, {"tensors": 1.0})]


def test_models_are_not_kept():
    before = len(FAILED)
    load(make(), {"other": torch.ones(1)})
    gc.collect()

    assert len(FAILED) == before
