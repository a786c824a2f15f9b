"""A hook calls its function, and none of its copies does."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gradwatch.probe.inert_hook import inert_hook


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_hook_is_called_and_its_copies_are_inert(copied):
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(inert_hook(lambda module, inputs, output: calls.append(module)))

    twin = copied(model)
    twin(torch.ones(2))
    assert calls == []

    model(torch.ones(2))
    assert calls == [model]


def test_a_hook_returns_what_its_function_returns():
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(inert_hook(lambda module, inputs: (2 * inputs[0],)))

    assert torch.equal(model(torch.ones(2)), model.weight.sum(1) * 2 + model.bias)
