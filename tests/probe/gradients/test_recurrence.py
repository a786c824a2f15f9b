"""The growth of a gradient through the uses of one parameter is that of the recurrence, and told where there is one."""

# B = samples, T = steps of a sequence, H = units

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.probe.gradients.recurrence import RecurrenceProbe, growth_of
from gradwatch.probe.output_reader import ForwardCall, OutputReaders

B, T, H = 4, 96, 8


class Loop(nn.Module):
    """A state that is multiplied by a matrix of its own, or by numbers, at each step."""

    def __init__(self, factor, *, elementwise=False, every=False):
        super().__init__()
        self.drive = nn.Linear(3, H)
        self.decay = nn.Parameter(torch.full((H,), factor) if elementwise else factor * torch.eye(H))
        self.elementwise, self.every = elementwise, every

    def forward(self, x):
        state, states = torch.zeros(B, H), []
        for t in range(T):
            state = (state * self.decay if self.elementwise else state @ self.decay.T) + self.drive(x[:, t])
            states.append(state)
        return torch.stack(states).sum(0) if self.every else state


def told(model, loss=torch.Tensor.sum):
    """Return what is told of one step."""
    recurrences = RecurrenceProbe(model)
    recurrences.clear()
    output = model(torch.randn(B, T, 3))
    recurrences.watch(ForwardCall(output))
    loss(output).backward()
    return list(recurrences.find())


def train(recurrences, outputs):
    """Return what is told of a step whose forward pass has given some outputs, one after another."""
    readers = OutputReaders([recurrences])
    readers.begin()
    for output in outputs():
        readers.watch(output, ())
    output.sum().backward()
    return list(recurrences.find())


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_factor_above_one_is_reported_with_the_growth_that_follows_from_it(elementwise):
    ((kind, layer, _, values),) = told(Loop(1.12, elementwise=elementwise))

    assert (kind, layer, values["uses"]) == ("graph-recurrence", "decay", T)
    assert values["growth"] == pytest.approx(T * np.log10(1.12), rel=0.2)


@pytest.mark.parametrize("every", [True, False])
def test_a_factor_of_one_is_not_reported_wherever_the_loss_looks(every):
    assert told(Loop(1.0, every=every)) == []


def test_a_factor_below_one_is_reported_as_what_shrinks_unless_the_loss_looks_everywhere():
    ((_, _, _, values),) = told(Loop(0.8))
    assert values["growth"] == pytest.approx(T * np.log10(0.8), rel=0.2)

    assert told(Loop(0.8, every=True)) == []


def test_uses_side_by_side_make_no_recurrence():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(3, H)

        def forward(self, x):
            return sum(10.0**-t * self.shared(x[:, t]) for t in range(24))

    assert told(Parallel()) == []


def test_a_cell_of_torch_in_a_loop_is_read():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.RNNCell(3, H, nonlinearity="relu")
            self.cell.weight_hh.data = 1.2 * torch.eye(H)
            self.cell.bias_ih.data.fill_(1.0)

        def forward(self, x):
            state = torch.ones(B, H)
            for t in range(T):
                state = self.cell(0 * x[:, t], state)
            return state

    ((_, layer, _, values),) = told(Cells())
    assert layer.startswith("cell.")
    assert values["growth"] == pytest.approx(T * np.log10(1.2), rel=0.2)


def test_gradients_and_hooks_are_as_they_were_afterwards():
    model, other = Loop(1.1), Loop(1.1)
    other.load_state_dict(model.state_dict())
    recurrences, x = RecurrenceProbe(model), torch.randn(B, T, 3)
    recurrences.clear()
    for it in (model, other):
        output = it(x)
        if it is model:
            recurrences.watch(ForwardCall(output))
        output.sum().backward()
    list(recurrences.find())

    assert torch.equal(model.decay.grad, other.decay.grad)
    assert not recurrences._handles


def test_without_a_recurrence_in_three_looks_nothing_is_looked_at_again():
    model = nn.Linear(3, H)
    recurrences = RecurrenceProbe(model)
    for _ in range(3):
        assert not recurrences.is_over
        train(recurrences, lambda: [model(torch.randn(B, 3))])

    assert recurrences.is_over


def test_looks_become_rare():
    model, looks = Loop(1.0), []
    recurrences = RecurrenceProbe(model)
    for step in range(40):
        recurrences.clear()
        recurrences.watch(ForwardCall(model(torch.randn(B, T, 3))))
        looks += [step] if recurrences._handles else []
        list(recurrences.find())

    assert looks == [0, 1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("saved_at", [1, 3, 5, 20])
def test_looks_go_on_from_a_saved_state_at_the_same_steps(saved_at):
    model, looks = Loop(1.0), []
    recurrences = RecurrenceProbe(model)
    for step in range(40):
        if step == saved_at:
            saved, recurrences = recurrences.state(), RecurrenceProbe(model)
            recurrences.restore(saved)
        recurrences.clear()
        recurrences.watch(ForwardCall(model(torch.randn(B, T, 3))))
        looks += [step] if recurrences._handles else []
        list(recurrences.find())

    assert looks == [0, 1, 2, 4, 8, 16, 32]


def test_what_was_reported_before_a_saved_state_is_not_reported_again():
    model = Loop(1.2)
    recurrences, resumed = RecurrenceProbe(model), RecurrenceProbe(model)
    assert train(recurrences, lambda: [model(torch.randn(B, T, 3))])

    resumed.restore(recurrences.state())

    assert not train(resumed, lambda: [model(torch.randn(B, T, 3))])


def test_a_loop_outside_of_the_model_is_read():
    cell = nn.Linear(H, H, bias=False)
    cell.weight.data = 1.15 * torch.eye(H)

    def states():
        state = torch.ones(B, H)
        for _ in range(T):
            state = cell(state)
            yield state

    ((_, layer, _, values),) = train(RecurrenceProbe(cell), states)

    assert layer == "weight"
    assert values["growth"] == pytest.approx(values["uses"] * np.log10(1.15), rel=0.2)
    assert values["uses"] >= T / 2


def test_what_a_device_sends_later_is_reported_later(monkeypatch):
    class Slow:
        is_ready = False

        def __init__(self, tensors):
            self._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

        def values(self):
            return self._arrays

    monkeypatch.setattr("gradwatch.probe.gradients.recurrence.HostTransfer", Slow)
    model = Loop(1.2)
    recurrences = RecurrenceProbe(model)
    assert train(recurrences, lambda: [model(torch.randn(B, T, 3))]) == []

    Slow.is_ready = True
    ((_, layer, _, _),) = recurrences.find()
    assert layer == "decay"


@pytest.mark.parametrize("norms", [np.zeros(1), np.array([1.0, 0.0] * 12), np.full(24, np.nan), np.full(24, np.inf)])
def test_what_was_not_read_whole_has_no_growth(norms):
    assert growth_of(norms) == 0.0


def test_stages_of_a_solver_whose_weights_differ_are_no_growth():
    orders = (-2.5, -1.8, -2.3, -9.7, -1.6, -8.9, -1.0, -1.5, -0.6, -1.3, -0.4, -0.9)
    late = (-5.6, -0.2, -4.5, 0.3, -0.3, 0.5, -0.2, 0.4, -0.2, -4.0, 0.1, -3.4)

    assert growth_of(10.0 ** np.array(orders + late)) == 0.0
