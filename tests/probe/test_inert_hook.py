"""A hook calls its function, and none of its copies does."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.inert_hook import add_input_hook, inert_hook


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


def test_a_script_leaves_the_hook_and_keeps_the_order_of_all_hooks():
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(inert_hook(lambda module, inputs, output: calls.append("first")))

    def scale(self, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    model.register_forward_hook(scale)
    model.register_forward_hook(inert_hook(lambda module, inputs, output: calls.append("last")))
    keys, x = list(model._forward_hooks), torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        scripted = torch.jit.script(model)

    assert calls == []
    assert torch.equal(scripted(x), 2 * nn.functional.linear(x, model.weight, model.bias))
    assert list(model._forward_hooks) == keys
    model(x)
    assert calls == ["first", "last"]


def test_an_error_in_a_hook_is_one_warning_and_the_next_calls_go_on():
    calls = []

    def read(module, inputs):
        calls.append(module)
        if len(calls) < 3:
            raise IndexError("no values")

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(inert_hook(read))
    with pytest.warns(RuntimeWarning, match="IndexError: no values") as told:
        nn.Sequential(*[model] * 4)(torch.ones(2))

    assert len(told) == 1
    assert len(calls) == 4


def test_an_error_that_the_user_can_fix_is_raised():
    def read(module, inputs):
        raise GradwatchError("the disk is full")

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(inert_hook(read))
    with pytest.raises(GradwatchError, match="the disk is full"):
        model(torch.ones(2))


def test_an_input_hook_that_another_hook_removes_during_a_call_is_silent():
    """Torch still calls it, without the keyword arguments."""
    model, seen, handles = nn.Linear(2, 1), [], []
    model.register_forward_pre_hook(lambda *_: handles[0].remove() if len(seen) == 1 else None)
    handles.append(add_input_hook(model, lambda _, args, kwargs: seen.append((len(args), kwargs))))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.ones(1, 2))

    assert seen == [(1, {})]
