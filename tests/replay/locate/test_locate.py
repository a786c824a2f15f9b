"""The first bad operation is named: what it is, in which module, on which line, and whose fault it is."""

import io
import json
from pathlib import Path

import pytest
import torch
from replay.locate.singularities import MIXED, PLANTS, SPREAD, ZEROS, Attention, EmptyRow, Log, Net, Plain, RootOfZero
from rich.console import Console
from torch import nn
from torch.nn.modules import module as hooks

import gradwatch
from gradwatch.cli.output.bad_operation import print_located
from gradwatch.replay.locate.bad_operation import Blame
from gradwatch.replay.locate.locate import locate

HERE = Path(__file__).with_name("singularities.py")


def located_in(plant):
    torch.manual_seed(0)
    model = Net(plant.part())
    if plant.compiled:
        model.compile(backend="eager")

    def step(inputs):
        with torch.autocast("cpu", dtype=torch.float16, enabled=plant.half):
            outputs = model(inputs)
        return outputs.float().sum()

    return locate(step, plant.inputs)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:.*use_reentrant")
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_singularity_is_found(name):
    plant = PLANTS[name]

    located = located_in(plant)

    assert located is not None, "it was not found"
    assert plant.says in (located.name, located.operation.name)
    assert located.operation.phase == plant.phase
    assert located.module == plant.module
    assert Path(located.place.file) == HERE
    guilty = "self.part(self.encoder(x))" if plant.module == "encoder" else "# here"
    assert located.place.text.endswith(guilty), located.place
    assert located.blame.name.lower() == plant.blame, located.because
    assert (located.leaf.name if located.leaf else "") == plant.leaf
    if plant.samples is not None:
        assert located.samples == plant.samples


def test_the_plants_are_many_and_of_every_sort():
    assert len(PLANTS) >= 20
    assert {p.phase for p in PLANTS.values()} == {"forward", "backward"}
    assert {p.blame for p in PLANTS.values()} == {v.name.lower() for v in Blame}


class Causal(nn.Module):
    """Attention that hides the future: infinite on purpose, row by row, and never in full."""

    def forward(self, h):
        hidden = torch.triu(torch.full((len(h), len(h)), float("-inf")), diagonal=1)
        return (h @ h.T / 2 + hidden).softmax(1) @ h


class RunningMaximum(nn.Module):
    """A maximum that starts at -inf, and a minimum that starts at inf."""

    def forward(self, h):
        best = torch.full((len(h),), float("-inf"))
        least = torch.full((len(h),), float("inf"))
        for column in h.unbind(1):
            best, least = torch.maximum(best, column), torch.minimum(least, column)
        return best - least


class GuardedLog(nn.Module):
    """A log of zero that is looked at and thrown away."""

    def forward(self, h):
        with torch.no_grad():
            shown = h.log().exp()
        return h + torch.where(torch.isfinite(shown), shown, 0.0)


class MaskedEntropy(nn.Module):
    """log_softmax is -inf where a score is masked, and is not used there."""

    def forward(self, h):
        logs = h.masked_fill(h < 0, float("-inf")).log_softmax(1)
        return logs[:, 1:].sum()


@pytest.mark.parametrize("part", [Causal, RunningMaximum, GuardedLog, MaskedEntropy, Plain, nn.ReLU])
def test_infinities_that_do_no_harm_are_not_blamed(part):
    model = Net(part())

    assert locate(lambda x: model(x).sum(), MIXED) is None


def test_bad_running_statistics_do_no_harm_in_training():
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(float("nan"))
    model = Net(norm)

    assert locate(lambda x: model(x).square().sum(), SPREAD) is None


def test_it_tells_shapes_types_and_ranges():
    model = Net(Log())

    located = gradwatch.locate(lambda x: model(x).sum(), MIXED)

    (given,), (got,) = located.operation.inputs, located.operation.outputs
    assert (given.shape, given.dtype, given.low, given.high, given.bad) == ((8, 4), "float32", 0.0, 2.0, 0)
    assert (got.bad, got.nans, got.negative_only) == (8, 0, True)
    assert (got.low, got.high) == pytest.approx((-0.6931, 0.6931), abs=1e-4)


def test_the_chain_leads_from_the_input_to_it():
    model = Net(Log())

    located = locate(lambda x: model(x).sum(), MIXED)

    assert [(o.module, o.name) for o in located.chain] == [("encoder", "addmm"), ("part", "clamp"), ("part", "log")]


def test_it_says_what_is_harmed():
    forward, backward = Net(Log()), Net(RootOfZero())

    in_loss = locate(lambda x: forward(x).sum(), MIXED)
    in_gradient = locate(lambda x: backward(x).sum(), ZEROS)

    assert in_loss.reaches == ("the loss",)
    assert set(in_gradient.reaches) == {"encoder.weight", "encoder.bias"}


def test_a_backward_operation_is_traced_to_the_forward_one():
    model = Net(RootOfZero())

    located = locate(lambda x: model(x).sum(), ZEROS)

    assert located.operation.node == "SqrtBackward0"
    assert (located.forward.name, located.forward.phase) == ("sqrt", "forward")
    assert located.title == "the backward pass of sqrt (div in SqrtBackward0)"


def test_everything_is_put_back():
    model = Net(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Log()))
    model(SPREAD).sum().backward()
    grads = [p.grad for p in model.parameters()]
    kept = [t.clone() for t in (*grads, *model.state_dict().values())]
    torch.manual_seed(3)
    drawn = torch.rand(3)
    torch.manual_seed(3)

    assert locate(lambda x: model(x).sum(), MIXED) is not None

    assert torch.equal(torch.rand(3), drawn), "the random generator stands where it stood"
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    for now, then in zip((*grads, *model.state_dict().values()), kept, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_a_step_that_raises_leaves_no_hook_behind():
    model = Net(Plain())
    before = len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        locate(lambda x: model(x).sum(), torch.ones(2, 3))

    assert (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)) == before


def test_a_step_may_run_its_own_backward_pass_under_a_scaler():
    model, scaler = Net(RootOfZero()), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        loss = model(x).sum()
        scaler.scale(loss).backward()
        return loss

    located = locate(step, ZEROS)

    assert (located.name, located.module, located.operation.phase) == ("sqrt", "part", "backward")


def test_a_step_without_modules_and_without_a_batch_is_followed_too():
    weight = torch.zeros(3, requires_grad=True)

    def step():
        return weight.norm(p=0.5) + weight.sqrt().sum()  # the root

    located = locate(step)

    assert located.place.text.endswith("# the root")
    assert located.module == ""
    assert located.samples == ()
    assert weight.grad is None, "it is put back"


def test_a_model_that_torch_compiles_is_followed_as_it_was_written():
    model = torch.compile(Net(RootOfZero()), backend="eager")

    located = locate(lambda x: model(x).sum(), ZEROS)

    assert (located.name, located.module) == ("sqrt", "part")
    assert set(located.reaches) == {"encoder.weight", "encoder.bias"}


def test_a_jump_is_named_where_all_is_finite():
    model = Net(Plain())

    def step(x):
        return (model(x) / 1e-9).sum()

    jumped = locate(step, SPREAD, jump=1e5)

    assert jumped.is_jump
    assert jumped.name == "div"
    assert "every value is finite" in jumped.because
    assert locate(step, SPREAD, jump=1e12) is None


def test_one_bad_sample_of_two_batch_tensors_is_named():
    model = Net(Plain())
    targets = torch.ones(8)
    targets[6] = float("nan")

    located = locate(lambda x, y: (model(x).sum(1) - y).square().mean(), SPREAD, targets)

    assert (located.blame, located.samples, located.leaf.name) == (Blame.DATA, (6,), "targets")


def test_the_plain_data_are_strict_json():
    model = Net(EmptyRow())
    located = locate(lambda x: model(x).sum(), SPREAD)

    told = json.loads(json.dumps(located.to_json(), allow_nan=False))

    assert told["operation"]["name"] == "softmax"
    assert told["operation"]["outputs"][0]["nan"] == 4


def test_attention_of_torch_is_one_module_of_the_path():
    model = Net(Attention())

    located = locate(lambda x: model(x).sum(), SPREAD)

    assert (located.module, located.operation.module_type) == ("part.attend", "MultiheadAttention")


def test_it_prints_as_the_command_line_does():
    located = located_in(PLANTS["log of zero"])

    recorder = Console(file=io.StringIO(), width=200)
    print_located(recorder, located, step=7)

    shown, printed = recorder.file.getvalue().splitlines(), str(located).splitlines()
    assert [line.rstrip() for line in shown] == [f"step 7: {printed[0]}", *printed[1:]]
    assert f"singularities.py:{located.place.line}, in {located.place.function}" in printed[2]
