"""Everything that a step reaches and changes is put back."""

import collections

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.stepping.reached_state import ReachedState


class Outputs(collections.OrderedDict):
    """A dictionary that refuses updates, as `ModelOutput` of transformers does."""

    def update(self, *args, **kwargs):
        raise TypeError("fixed")


class Counter:
    def __init__(self):
        self.calls = 0
        self.seen = []


def test_containers_attributes_and_variables_are_put_back():
    counter, outputs, total = Counter(), Outputs(loss=1), 0

    def step():
        nonlocal total
        total += 1
        counter.calls += 1
        counter.seen.append(total)
        outputs["norm"] = 2

    state = ReachedState(step)
    step()
    state.restore()

    assert (total, counter.calls, counter.seen, list(outputs.items())) == (0, 0, [], [("loss", 1)])


def test_a_rewind_keeps_the_hooks_of_modules_and_a_restore_does_not():
    layer = nn.Linear(2, 2)
    state = ReachedState(layer)
    layer.register_forward_hook(lambda *_: None)
    layer.extra = 1

    state.rewind()
    kept = len(layer._forward_hooks)
    state.restore()

    assert (kept, len(layer._forward_hooks), hasattr(layer, "extra")) == (1, 0, False)


def test_a_tensor_without_a_copy_gets_its_memory_back():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    memory = weight.data_ptr()
    state = ReachedState(weight, copies=lambda _: False)
    weight.grad = None
    weight.data = torch.zeros(3, dtype=torch.float64)

    state.restore()

    assert (weight.data_ptr(), weight.dtype, weight.tolist()) == (memory, torch.float32, [1, 1, 1])
    assert weight.grad.tolist() == [1, 1, 1]


def test_a_check_leaves_the_containers_of_a_step_as_they_were():
    layer, losses = nn.Linear(3, 1), []

    def step(x):
        loss = layer(x).square().mean()
        losses.append(loss.item())
        return loss

    found = gradwatch.check(step, torch.randn(4, 3), model=layer)

    assert found.verdict == "right"
    assert losses == []


def test_a_check_without_a_parameter_to_train_leaves_the_format_of_the_model():
    layer = nn.Linear(3, 1).requires_grad_(False)

    with pytest.raises(GradwatchError, match="nothing requires a gradient"):
        gradwatch.check(lambda x: layer(x).sum(), torch.randn(4, 3), model=layer)

    assert layer.weight.dtype == torch.float32
