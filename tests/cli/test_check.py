"""`gradwatch check` takes a layer, a config or a run, and its exit code is the verdict."""

import json
import sys

import pytest

LAYER = """
import torch
from torch import nn


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 6 * x**2


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.last = nn.Linear(width, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Cube.apply(self.first(x)))
"""
CONFIG = """\
model: {name: mlp, depth: 1, width: 8}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
schedule: {name: cosine_annealing}
train: {steps: 4, accumulate: 2, checkpoint: {every: 2}}
"""
SCRIPT = """
import sys
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(16, 4)
for step in range(3):
    optimizer.zero_grad()
    for part in inputs.chunk(2):
        (model(part).square().mean() / int(sys.argv[2])).backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a module of layers and a config, which is the current one."""
    (tmp_path / "cubes.py").write_text(LAYER)
    (tmp_path / "train.py").touch()
    (tmp_path / "small.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cubes", raising=False)
    return tmp_path


def test_a_wrong_layer_is_named_and_exits_with_1(gradwatch, folder):
    done = gradwatch("check", "cubes:Layer", "--input", "8x16")

    assert done.code == 1
    assert done.out.startswith("the gradient is wrong\n")
    assert "the gradient of `x` in Cube.backward (cubes.py:15) is 2 times too large" in done.out


def test_json_holds_the_fault_and_the_coverage(gradwatch, folder):
    done = gradwatch("check", "cubes:Layer(5)", "--input", "6x5", "--format", "json")

    found = json.loads(done.out)
    assert (found["verdict"], found["faults"][0]["kind"], found["faults"][0]["line"]) == ("wrong", "factor", 15)
    assert found["faults"][0]["ratio"] == pytest.approx(2.0, rel=1e-4)
    assert {t["name"]: t["verdict"] for t in found["tensors"]}["last.weight"] == "right"
    assert found["layer"]["verdict"] == "holds"


def test_the_properties_of_a_layer_follow_its_gradient(gradwatch, folder):
    (folder / "cubes.py").write_text(LAYER.replace("Cube.apply(self.first(x))", "self.first(x).softmax(0)"))

    done = gradwatch("check", "cubes:Layer", "--input", "8x16")

    assert done.code == 1
    assert done.out.startswith("the gradient is right\n")
    assert "samples        fails        `softmax` in Layer mixes the samples of the batch" in done.out


def test_a_batch_of_1_leaves_the_properties_out(gradwatch, folder):
    done = gradwatch("check", "torch.nn:Linear(6, 2)", "--input", "1x6")

    assert done.code == 0
    assert "note: the properties of the layer were not checked: " in done.out
    assert "the input has 1 sample along axis 0, expected at least 2" in done.out


def test_a_layer_of_torch_with_integers_is_right(gradwatch, folder):
    assert gradwatch("check", "torch.nn:Embedding(10, 4)", "--input", "8x3:10").code == 0


def test_part_of_a_layer_can_be_checked_and_a_function_allowed(gradwatch, folder):
    assert gradwatch("check", "cubes:Layer", "--input", "8x16", "--layer", "last").code == 0
    assert gradwatch("check", "cubes:Layer", "--input", "8x16", "--allow", "Cube").code == 0


def test_a_second_derivative_that_leaves_the_graph_is_wrong(gradwatch, folder):
    (folder / "cubes.py").write_text(LAYER.replace("grad * 6 * x**2", "grad * 3 * x.detach()**2"))

    assert gradwatch("check", "cubes:Layer", "--input", "8x16").code == 0
    done = gradwatch("check", "cubes:Layer", "--input", "8x16", "--second")

    assert done.code == 1
    assert "the second derivative through Cube.backward is wrong: a part of it leaves the graph" in done.out
    assert "cubes.py:15" in done.out


def test_a_config_and_a_step_of_its_run_are_right(gradwatch, folder):
    by_config = gradwatch("check", "small.yaml", "--set", "train.accumulate=3")
    assert by_config.code == 0
    assert "the loss is the mean over its halves, and so is the gradient" in by_config.out
    assert not (folder / "runs").exists()

    gradwatch("train", "small.yaml", "--log-format", "json")
    (run,) = (folder / "runs").iterdir()
    by_run = gradwatch("check", run, "--step", "3")
    assert by_run.code == 0
    assert f"note: step 3 of {run}" in by_run.out


def test_the_step_of_a_config_and_of_its_run_is_audited(gradwatch, folder):
    by_config = gradwatch("check", "small.yaml", "--step-audit", "--set", "train.precision=fp16", "--format", "json")
    assert by_config.code == 0
    assert json.loads(by_config.out)["verdict"] == "as meant"
    assert {s["name"] for s in json.loads(by_config.out)["stages"] if s["verdict"] == "not seen"} == {"clip"}
    assert not (folder / "runs").exists()

    gradwatch("train", "small.yaml", "--log-format", "json")
    (run,) = (folder / "runs").iterdir()
    by_run = gradwatch("check", run, "--step-audit", "--step", "3")
    assert by_run.code == 0
    assert by_run.out.startswith("the step is as meant\n")
    assert f"note: step 3 of {run}" in by_run.out


def test_a_part_of_a_model_that_gets_no_gradient_fails_the_audit(gradwatch, folder):
    model = LAYER.replace("Cube.apply(self.first(x))", "self.first(x.flatten(1)).detach()").replace("(4, 2)", "(4, 10)")
    (folder / "cubes.py").write_text(model)
    setting = ["--set", "model.target=cubes:Layer", "--set", "model.width=64"]
    (folder / "small.yaml").write_text(CONFIG.replace("{name: mlp, depth: 1, width: 8}", "{}"))

    done = gradwatch("check", "small.yaml", *setting, "--step-audit")

    assert done.code == 1
    assert done.out.startswith("the step differs in its gradient\n")
    assert "the loss depends on `first.weight`, `first.bias`, but no gradient reaches it" in done.out
    assert gradwatch("check", "small.yaml", *setting, "--step-audit", "--allow", "gradient-dropped").code == 0


def test_a_script_is_audited_with_its_arguments(gradwatch, folder):
    (folder / "train.py").write_text(SCRIPT)

    right = gradwatch("check", "train.py", "--step-audit", "--format", "json", "--", "--divide", "2")
    wrong = gradwatch("check", "train.py", "--step-audit", "--", "--divide", "1")

    assert (right.code, json.loads(right.out)["verdict"]) == (0, "as meant")
    assert wrong.code == 1
    assert "the loss of each of 2 micro-batches is not divided by their number" in wrong.out
    assert f"train.py:{SCRIPT[: SCRIPT.index('backward')].count(chr(10)) + 1}: " in wrong.out


def test_the_digits_of_a_layer_and_of_the_step_of_a_config_are_measured(gradwatch, folder):
    of_layer = gradwatch("check", "cubes:Layer", "--input", "8x16", "--precision")
    assert of_layer.code == 0
    assert of_layer.out.startswith("digits of the step, next to the same operations in float64\n  fp32\n")

    of_config = gradwatch("check", "small.yaml", "--precision", "--whole", "--format", "json")
    assert of_config.code == 0
    found = json.loads(of_config.out)
    assert [(f["format"], f["whole"]) for f in found["formats"]] == [("fp32", False), ("bf16", True), ("fp16", True)]
    assert found["notes"] == ["the first 8 samples of each micro-batch were run"]
    assert not (folder / "runs").exists()


def test_a_step_that_is_not_finite_in_float32_exits_with_1(gradwatch, folder):
    (folder / "cubes.py").write_text(LAYER.replace("self.first(x))", "self.first(x) * 1e20)"))

    done = gradwatch("check", "cubes:Layer", "--input", "8x16", "--precision")

    assert done.code == 1
    assert "forward   not finite: pow (cubes.py:10)" in done.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["small.yaml", "--whole"], "--whole: has no meaning without --precision"),
        (["small.yaml", "--precision", "--step-audit"], "--precision: has no meaning with --step-audit"),
        (["small.yaml", "--precision", "--layer", "first"], "--layer: has no meaning with --step-audit or --precision"),
        (
            ["nothing"],
            "there is no file or folder 'nothing'; expected a config, a run directory or package.module:Layer",
        ),
        (["cubes:Layer"], "cubes:Layer is a layer, expected the shape of each input: --input 8x16"),
        (["cubes:Layer", "--input", "8y16"], "--input: got '8y16', expected a shape such as 8x16"),
        (["cubes:Layr", "--input", "8x16"], "module 'cubes' has no 'Layr'; did you mean 'Layer'?"),
        (["cubes:Layer(7)", "--input", "8x16"], "cubes:Layer(7) does not take inputs of 8x16: RuntimeError"),
        (["cubes:Layer(width=x)", "--input", "8x16"], "arguments that are not literals"),
        (
            ["cubes:Layer", "--input", "8x16", "--layer", "frist"],
            "no parameter in layer 'frist'; did you mean 'first'?",
        ),
        (["cubes:Layer", "--input", "8x16", "--step", "3"], "--step: has no meaning for cubes:Layer, which is a layer"),
        (["small.yaml", "--set", "model.widht=3"], "widht"),
        (["cubes:Layer", "--step-audit"], "--step-audit: has no meaning for cubes:Layer, which is a layer"),
        (["small.yaml", "--step-audit", "--second"], "--second: has no meaning with --step-audit"),
        (["small.yaml", "--step-audit", "--layer", "first"], "--layer: has no meaning with --step-audit"),
        (["small.yaml", "--step-audit", "--allow", "froze"], "there is no kind 'froze'; did you mean 'frozen'?"),
        (["train.py"], "train.py is a script; its step is compared with --step-audit"),
        (["small.yaml", "optim.lr=3"], "Got unexpected extra argument: optim.lr=3; did you mean `--set optim.lr=3`?"),
        (["."], "not a run of `gradwatch train`"),
    ],
)
def test_a_mistake_in_the_call_exits_with_2(gradwatch, folder, args, message):
    done = gradwatch("check", *args)

    assert done.code == 2
    assert message in done.err.replace("\n", " ")
