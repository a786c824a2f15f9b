"""An error about a tensor that was changed in place gets a note with both lines."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.probe.graph import in_place
from gradwatch.probe.graph.in_place import IN_PLACE, explain_in_place, record_in_place


def sigmoid_then_add(x):
    y = torch.sigmoid(x)
    y += 1
    return y.sum()


def view_that_is_written(x):
    y = x.exp()
    rows = y[1:]
    rows.mul_(2)
    return y.sum()


def weight_updated_before_backward(x):
    weight = torch.ones(4, 2, requires_grad=True)
    y = torch.tanh(x @ weight) @ torch.ones(2, 1)
    with torch.no_grad():
        weight.sub_(0.1)
    return y.sum()


def activation_in_place(x):
    y = torch.tanh(x)
    z = F.relu(y, inplace=True)
    return z.sum()


def index_written(x):
    y = x.sqrt()
    y[0] = 0.0
    return y.sum()


STEPS = {
    sigmoid_then_add: ("y = torch.sigmoid(x)", "add", "y += 1"),
    view_that_is_written: ("y = x.exp()", "mul", "rows.mul_(2)"),
    weight_updated_before_backward: ("y = torch.tanh(x @ weight) @ torch.ones(2, 1)", "sub", "weight.sub_(0.1)"),
    activation_in_place: ("y = torch.tanh(x)", "relu", "z = F.relu(y, inplace=True)"),
    index_written: ("y = x.sqrt()", "fill", "y[0] = 0.0"),
}


def inputs():
    return torch.rand(3, 4, requires_grad=True)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_locate_names_the_line_that_saved_and_the_line_that_wrote(step):
    saved, name, wrote = STEPS[step]
    with pytest.raises(RuntimeError, match=IN_PLACE) as raised:
        gradwatch.locate(step, inputs())

    (note,) = raised.value.__notes__
    before, _, after = note.partition(f"changed in place by {name}")
    assert f"`{saved}`" in before
    assert f"`{wrote}`" in after
    assert note.count("test_in_place.py:") == 2


def test_gradients_are_as_before():
    x = inputs()
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        gradwatch.locate(lambda x: sigmoid_then_add(layer(x)) + layer(x).sum(), x, model=layer)

    assert layer.weight.grad.eq(1).all()
    assert layer.bias.grad is None


def test_other_errors_are_left_as_they_are():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    explain_in_place(error, lambda: pytest.fail("was run again"))

    assert not hasattr(error, "__notes__")


def test_a_step_that_does_not_fail_again_gets_no_note():
    error = RuntimeError(f"one of the variables has been {IN_PLACE}")
    explain_in_place(error, lambda: inputs().sum().backward())

    assert not hasattr(error, "__notes__")


def train(step, steps=3):
    """Make some steps of which the last changes a saved tensor, and return the losses before it."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = layer(torch.rand(3, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if step:
        step(layer(torch.rand(3, 4))).backward()
    return losses


@pytest.mark.parametrize("kept", [in_place.KEPT_OPERATIONS, 1])
def test_a_recorded_process_names_both_lines_when_the_backward_pass_fails(kept, monkeypatch):
    monkeypatch.setattr(in_place, "KEPT_OPERATIONS", kept)
    plain = train(None)

    with contextlib.ExitStack() as until:
        record_in_place(until=until)
        assert train(None) == plain
        with pytest.raises(RuntimeError, match=IN_PLACE) as raised:
            train(sigmoid_then_add)

    (note,) = raised.value.__notes__
    assert note.startswith("gradwatch: a tensor (3x4) was saved for the backward pass at ")
    assert "`y = torch.sigmoid(x)`" in note
    # of operations that were made too long ago, the line is forgotten
    assert ("changed in place by add at" in note and "`y += 1`" in note) == (kept > 1)
    assert train(None) == plain  # nothing is recorded any more
    with pytest.raises(RuntimeError, match=IN_PLACE) as raised:
        train(sigmoid_then_add)
    assert not hasattr(raised.value, "__notes__")
