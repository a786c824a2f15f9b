"""AdamW with moments in 8 bits is planned, resumed and replayed like any other optimizer."""

import contextlib
import json
import shutil

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gradwatch import load_run
from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError, GradwatchError
from gradwatch.optimizers import adamw8bit
from gradwatch.planning.ledger import dense
from gradwatch.planning.training import ConfigPlanner
from gradwatch.render import packages
from gradwatch.train import checkpoint
from gradwatch.train.loop import train

CONFIG = """\
model: {{name: mlp, depth: 3, width: 64}}
data: {{name: digits}}
optim: {{name: AdamW8bit, lr: 2e-3}}
schedule: {{name: cosine_annealing}}
train: {{steps: 6, device: cpu}}
run: {{out: {out}}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.format(out=tmp_path))
    return path


@pytest.fixture
def eager():
    """Run the update without the compiler, which takes 10 s for the shapes of a small model."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_resumed_and_a_replayed_training_are_bit_identical(config, eager, capsys):
    run = train(load_config(config, ["train.checkpoint.every=3"]), log_format="json").directory
    losses, (_, whole) = load_run(run)["loss"], checkpoint.load(run / "checkpoints")
    shutil.rmtree(run / "checkpoints" / "step-000006")  # so that the run goes on from step 3

    train(load_config(config), resume=run, log_format="json")
    code = main(["replay", str(run), "--step", "5"])

    _, resumed = checkpoint.load(run / "checkpoints")
    assert load_run(run)["loss"].tolist() == losses.tolist()
    for name in ("model", "optimizer"):
        leaves = zip(tree_leaves(resumed[name]), tree_leaves(whole[name]), strict=True)
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves)
    assert {"codes", "scale", "signed"} == whole["optimizer"]["state"][0]["exp_avg"].keys()
    assert code == 0
    assert "bit-identical" in capsys.readouterr().out


def test_the_plan_counts_the_bytes_of_its_state(config, eager):
    planner = ConfigPlanner(
        lambda changes: load_config(config, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    )
    training, window = planner.real_step()
    training.stepper(lambda: 1.0).run(window)
    held = [value for state in training.optimizer.state.values() for value in state.values()]

    small, plain, measured = planner.plan(), planner.plan({"optim.name": "adamw"}), planner.measure()

    state = sum(part.nbytes for tensor in held for part in dense(tensor))
    rate = 4  # the learning rate is a tensor too
    assert small.parts["optimizer"] - state in (0, rate)
    assert measured.parts["optimizer"] == small.parts["optimizer"]
    assert small.notes[0] == "the update is compiled: what it takes is counted, and it is not run"
    # two layers of 64 x 64 numbers, of which each moment takes a byte, a scale for each 256, and a table of 256 codes
    assert plain.parts["optimizer"] - state == pytest.approx(2 * 2 * (4096 * (4 - 1) - 4 * 16 - 4 * 256), abs=8)


def test_without_its_package_the_config_says_what_to_install(config, monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        load_config(config, is_new=True)
    with pytest.raises(GradwatchError, match="needs the package torchao, which is not installed; pip install torchao"):
        adamw8bit.build([torch.zeros(1, requires_grad=True)])

    (problem,) = caught.value.problems
    assert str(problem).startswith("optim.name: the package torchao is not installed")
    assert problem.help == "pip install torchao"


@pytest.mark.parametrize(("cycled", "is_wrong"), [("true", True), ("null", True), ("false", False)])
def test_a_schedule_that_would_compile_every_step_is_a_mistake(config, cycled, is_wrong):
    options = "" if cycled == "null" else f", cycle_momentum: {cycled}"
    schedule = f"schedule={{name: one_cycle, max_lr: 3e-3{options}}}"

    with pytest.raises(ConfigError, match="OneCycleLR moves the betas") if is_wrong else contextlib.nullcontext():
        assert load_config(config, [schedule], is_new=True)
