"""Remedies are changes that a config takes, with numbers that follow from the run."""

import math
from dataclasses import replace

import pytest
import yaml

from gradwatch.config.load import load_config
from gradwatch.diagnose.remedies import KNOWN, remedies
from gradwatch.diagnose.run_numbers import RunNumbers, measure_run
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Severity

FINDING = Finding(
    code="GW108", kind="no-gradient", layer="encoder", step=10, severity=Severity.WARNING, message="it gets none"
)
STEADY = RunNumbers(steady_rate=0.02, jumped_at=None, usual_norm=0.7, update_ratio=2e-6)
JUMPED = RunNumbers(steady_rate=0.001, jumped_at=60, usual_norm=0.7, update_ratio=0.1)
UNKNOWN = RunNumbers(steady_rate=math.nan, jumped_at=None, usual_norm=math.nan, update_ratio=math.nan)

CONFIG = """
model: {name: mlp, depth: 4, width: 32, activation: sigmoid}
data: {name: npz, file: table.npz}
optim: {name: adamw, lr: 1e-3}
schedule: {name: multi_step, milestones: [60], gamma: 1000.0}
train: {steps: 150, precision: fp16}
"""


@pytest.mark.parametrize("run", [STEADY, JUMPED, UNKNOWN], ids=["steady", "jumped", "unknown"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_patch_is_one_that_the_config_takes(name, run, tmp_path):
    path = tmp_path / "ill.yaml"
    path.write_text(CONFIG)

    for remedy in remedies([name], findings=[FINDING], numbers=run):
        assert remedy.text, "a remedy is said in words"
        assert "{" not in remedy.text, "a placeholder is left"
        overrides = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in remedy.patch.items()]
        load_config(path, [text.replace("\n...\n", "").strip() for text in overrides])


def test_the_rate_is_lowered_tenfold_where_it_was_steady_and_put_back_where_it_jumped():
    lower = remedies(["lower_rate", "drop_jump"], findings=[FINDING], numbers=STEADY)
    back = remedies(["lower_rate", "drop_jump"], findings=[FINDING], numbers=JUMPED)

    assert [r.patch for r in lower] == [{"optim.lr": 0.002}]
    assert [r.patch for r in back] == [{"schedule": None, "optim.lr": 0.001}]
    assert "step 60" in back[0].text


def test_the_rate_is_raised_towards_the_usual_ratio():
    (remedy,) = remedies(["raise_rate"], findings=[FINDING], numbers=STEADY)

    assert remedy.patch == {"optim.lr": 2.0}, "1e-3 / 2e-6 is 500: a hundredfold"


def test_the_norm_is_clipped_at_twice_the_usual_or_at_one_where_it_was_ill_from_the_start():
    run = replace(STEADY, usual_norm=7e3)

    (late,) = remedies(["clip"], findings=[replace(FINDING, step=200)], numbers=run)
    (early,) = remedies(["clip"], findings=[FINDING], numbers=run)

    assert late.patch == {"train.clip": {"norm": 10000.0}}, "14000 with one digit"
    assert early.patch == {"train.clip": {"norm": 1.0}}


def test_layers_are_named_at_most_three():
    findings = [replace(FINDING, layer=f"l{i}") for i in range(5)]

    (remedy,) = remedies(["reattach"], findings=findings, numbers=STEADY)

    assert "l0, l1, l2 and 2 more" in remedy.text


def test_numbers_tell_a_jump_of_the_rate_from_a_warm_up_and_a_restart():
    jump, warm, restart = Synthetic(steps=80), Synthetic(steps=80), Synthetic(steps=80)
    jump.lr_T[50:] *= 100
    warm.lr_T *= (1 + warm.t_T) / 80
    restart.lr_T[20:50] /= 100

    assert measure_run(jump.history(), until=79).jumped_at == 50
    assert measure_run(jump.history(), until=79).steady_rate == pytest.approx(1e-3)
    assert measure_run(jump.history(), until=40).jumped_at is None, "it has not happened yet"
    assert measure_run(warm.history(), until=79).jumped_at is None
    assert measure_run(restart.history(), until=79).jumped_at is None, "the rate comes back to what it was"
