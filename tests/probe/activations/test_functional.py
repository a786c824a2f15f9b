"""Activations that are functions are found in the autograd graph, named by the matrix that they follow."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.monitor import Schedule
from gradwatch.probe.activations import functional
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device import sync
from gradwatch.records import ActivationInfo

DEAD, SATURATED, MEAN, STD = range(4)
FUNCTIONS = {
    "relu": (F.relu, nn.ReLU()),
    "relu in place": (lambda x: (x + 0).relu_(), nn.ReLU()),
    "clamp from zero": (lambda x: x.clamp(min=0), nn.ReLU()),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), nn.ReLU()),
    "relu6": (F.relu6, nn.ReLU6()),
    "tanh": (torch.tanh, nn.Tanh()),
    "sigmoid": (lambda x: x.sigmoid(), nn.Sigmoid()),
    "hardtanh": (F.hardtanh, nn.Hardtanh()),
    "hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid()),
    "softmax": (lambda x: x.softmax(1), nn.Softmax(dim=1)),
}


class Calls(nn.Module):
    """Two layers with a function in between."""

    def __init__(self, function=F.relu, *, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.scale = function, scale
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.function(self.scale * self.first(x)))


def inputs(count=32):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


def look(model, run=None, *, has_room=True):
    """Return what a probe finds in a step of a model, by name: kind and statistics."""
    told = []
    with ActivationProbe(model) as probe:
        probe.find_functions(lambda infos: told.append(infos) or has_room)
        probe.arm()
        (run or (lambda: model(inputs()).square().sum().backward()))()
        row_SA = probe.read()
        assert len(told) <= 1, "the layout is told once"
        return {i.name: (i.module_type, column) for i, column in zip(probe.infos, _columns(row_SA), strict=False)}


def _columns(row_SA):
    return [] if row_SA is None else sync.to_host(row_SA).T


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_what_the_module_of_its_kind_gives(name):
    function, module = FUNCTIONS[name]
    model = Calls(function, scale=4.0)
    twin = Calls(module, scale=4.0)
    with ActivationProbe(twin) as probe:
        probe.arm()
        twin(inputs()).square().sum().backward()
        (expected,) = sync.to_host(probe.read()).T

    kind, found = look(model)[f"first.{type(module).__name__.lower()}"]

    assert kind == type(module).__name__
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_module_is_not_seen_twice():
    assert list(look(Calls(nn.ReLU()))) == ["function"]


@pytest.mark.parametrize(
    ("formula", "shape"), [("ni,ij->nj", (6, 16)), ("ni,eij->enj", (4, 6, 16))], ids=["a weight", "a stack of weights"]
)
def test_a_weight_that_einsum_multiplies_by_is_a_matrix(formula, shape):
    class Layer(nn.Module):
        def __init__(self, formula, *shape):
            super().__init__()
            self.formula, self.weight = formula, nn.Parameter(torch.randn(shape))

        def forward(self, x):
            return torch.einsum(self.formula, x, self.weight)

    torch.manual_seed(0)
    model = nn.Module()
    model.first = Layer(formula, *shape)
    model.second = Layer("...j,jk->...k", 16, 3)
    model.forward = lambda x: model.second(torch.tanh(model.first(x)) + 0)

    kind, found = look(model, lambda: model(100 * inputs()).sum().backward())["first.tanh"]

    assert kind == "Tanh"
    assert found[SATURATED] > 0.9


def test_a_product_of_two_values_makes_no_activation_hidden():
    class Weighted(Calls):
        def forward(self, x):
            scores = super().forward(x)
            return torch.bmm(F.relu(1 - scores).unsqueeze(1), scores.exp().unsqueeze(2)).mean()

    model = Weighted(F.gelu)

    assert not look(model, lambda: model(inputs()).backward()), "a loss within the model weighs its terms"


class Turns(nn.Module):
    """Two layers that take turns at the same place, before a third one."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x, *, is_one, norm=1.0):
        hidden = self.one(x) if is_one else self.other(x)
        return self.last(F.relu(hidden / norm))


def test_an_activation_is_named_by_the_layer_that_had_its_turn():
    model = Turns()
    found = functional.FunctionalActivations({"": model})

    def names(**given):
        found.begin()
        return [seen.name for seen in found.find(model(inputs(), **given), known=set())]

    assert names(is_one=True) == names(is_one=True) == ["one.relu"]
    assert names(is_one=False) == ["other.relu"]
    assert names(is_one=True, norm=torch.ones(4, requires_grad=True)) == ["one.relu"]


def test_units_of_a_convolution_are_its_channels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(F.relu(self.conv(x)).mean((2, 3)))

    model = Net()
    with torch.no_grad():
        model.conv.bias[:6] = -100.0

    found = look(model, lambda: model(torch.randn(4, 1, 6, 6)).sum().backward())

    assert found["conv.relu"][1][DEAD] >= 6 / 8


def test_a_sigmoid_that_multiplies_is_a_gate():
    class Gated(Calls):
        def forward(self, x):
            h = self.first(x)
            return self.second(torch.sigmoid(h) * h)

    assert [kind for kind, _ in look(Gated()).values()] == ["Gate"]


def test_attention_is_named_by_its_query_also_within_torchs_own_module():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    model = Attends()

    assert list(look(model, lambda: model(torch.randn(2, 5, 8)).sum().backward())) == ["attention.softmax"]


def test_a_softmax_of_logits_and_noise_is_a_sample():
    sampled = Calls(lambda x: F.gumbel_softmax(x, tau=0.2))
    relaxed = Calls(lambda x: (x / 0.2).softmax(-1))

    assert [kind for kind, _ in look(sampled).values()] == ["SoftmaxSample"]
    assert [kind for kind, _ in look(relaxed).values()] == ["Softmax"]


def test_attention_with_a_mask_and_a_temperature_is_no_sample():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            scores = self.query(x) @ self.query(x).transpose(1, 2)
            return self.value(((scores + torch.zeros(5, 5)) / 2.0).softmax(-1) @ x)

    model = Masked()
    found = look(model, lambda: model(torch.randn(2, 5, 8)).sum().backward())

    assert [kind for kind, _ in found.values()] == ["Softmax"]


def test_rows_that_a_mask_leaves_no_choice_are_not_saturated():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            scores = self.query(x) @ x.transpose(1, 2) / math.sqrt(8)
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
            return self.value(scores.softmax(-1) @ x)

    model = Causal()
    found = look(model, lambda: model(torch.randn(16, 3, 8) * 0.1).sum().backward())

    assert found["query.softmax"][1][SATURATED] == 0, "a third of the rows see themselves alone"


def test_what_a_loss_within_the_model_computes_is_no_activation():
    class Ranked(Calls):
        def forward(self, x):
            scores = super().forward(x)
            return F.relu(1 - scores).mean()

    model = Ranked(F.gelu)

    assert not look(model, lambda: model(inputs()).backward())


def test_gates_of_recurrent_modules_are_left_out():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.cell(x)[0])

    model = Recurrent()

    assert not look(model, lambda: model(torch.randn(2, 5, 6)).sum().backward())


def test_a_checkpointed_region_is_not_computed_again():
    class Saving(Calls):
        calls = 0

        def body(self, x):
            self.calls += 1
            return F.relu(self.first(x))

        def forward(self, x):
            return self.second(checkpoint(self.body, x, use_reentrant=False))

    model = Saving()

    found = look(model, lambda: model(inputs()).sum())

    assert not found
    assert model.calls == 1


def test_what_was_written_over_is_left_out():
    class Overwrites(Calls):
        def forward(self, x):
            h = torch.relu(self.first(x))
            h.add_(1)
            return self.second(h)

    model = Overwrites()

    assert not look(model, lambda: model(inputs()))


def test_layers_that_the_loop_calls_itself_are_seen_behind_the_next():
    model = nn.ModuleDict({"one": nn.Linear(6, 16), "two": nn.Linear(16, 3)})

    found = look(model, lambda: model["two"](torch.relu(model["one"](inputs()))).sum().backward())

    assert list(found) == ["one.relu"]


def test_after_the_first_look_only_the_outermost_modules_have_hooks():
    model = nn.Sequential(Calls(), nn.Linear(3, 3))
    with ActivationProbe(model) as probe:
        probe.find_functions(lambda infos: True)
        probe.arm()
        model(inputs()).sum().backward()
        probe.read()
        probe.arm()
        hooked = [name for name, module in model.named_modules() if module._forward_hooks]

    assert hooked == [""]
    assert not model._forward_hooks, "and none afterwards"


def test_without_room_functions_are_not_watched():
    model = Calls()
    with ActivationProbe(model) as probe:
        probe.find_functions(lambda infos: False)
        probe.arm()
        model(inputs()).sum().backward()
        assert probe.read() is None
        assert probe.infos == ()


def test_a_layout_that_is_known_is_kept():
    model = Calls(torch.tanh)
    relu = ActivationInfo(name="first.relu", module_type="ReLU")
    infos = (relu, ActivationInfo(name="first.tanh", module_type="Tanh"))
    with ActivationProbe(model) as probe:
        probe.expect(infos)
        probe.arm()
        model(inputs()).sum().backward()
        row_SA = sync.to_host(probe.read())

    assert np.isnan(row_SA[:, 0]).all(), "not called any more"
    assert abs(row_SA[MEAN, 1]) < 1


@pytest.mark.parametrize("keeps", [0.0, 0.5])
def test_a_cell_that_the_loop_calls_again_and_again_is_read_once_at_each_call(keeps, monkeypatch):
    walked, walk = [], functional._walk

    def counted(roots, **how):
        nodes, users = walk(roots, **how)
        walked.append(len(nodes))
        return nodes, users

    monkeypatch.setattr(functional, "_walk", counted)

    class Cell(Calls):
        """A cell that keeps a part of its state without a matrix, as a gated one does."""

        def forward(self, state, keeps):
            new = super().forward(state)
            return keeps * state + (1 - keeps) * new if keeps else new

    cell = Cell(torch.tanh)
    cell.second = nn.Linear(16, 6)

    def run():
        state = inputs()
        for _ in range(60):
            state = cell(state, keeps)
        state.sum().backward()

    assert look(cell, run)["first.tanh"][0] == "Tanh"
    assert max(walked) <= 24, "what lies behind the call before is left to it"


def test_a_compiled_model_is_compiled_as_often_as_without():
    assert compilations(finds=True) == compilations(finds=False)


def compilations(*, finds):
    torch._dynamo.reset()
    model, counter = Calls(), CompileCounter()
    with ActivationProbe(model) as probe:
        if finds:
            probe.find_functions(lambda infos: True)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for step in range(4):
            if step % 2 == 0:
                probe.arm()
            compiled(inputs()).sum().backward()
            assert probe.read() is None, "a compiled region shows nothing"
    return counter.frame_count


def test_a_run_on_disk_holds_the_functions_of_its_first_step(tmp_path):
    model = Calls()
    with torch.no_grad():
        model.first.bias.fill_(-100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run", schedule=Schedule(budget=0.0)) as monitor:
        for _ in range(21):
            loss = model(inputs()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)

    run = gradwatch.load_run(tmp_path / "run")

    assert run.history.info.activations == (ActivationInfo(name="first.relu", module_type="ReLU"),)
    assert run.history["act.dead_frac"].tolist() == [[1.0]] * 3
    assert ("dead-relu", "first.relu") in {(f.kind, f.layer) for f in run.history.findings}
