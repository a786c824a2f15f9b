"""Changes are rehearsed from the recorded state nearest before the fault, where they can be made there."""

import contextlib
import math
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from poisoned import BATCH, SAMPLES, STEP, poisoned

from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import read
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.incident import recorder
from gradwatch.records import Finding, Remedy, Severity
from gradwatch.replay.config_change import config_of
from gradwatch.replay.incident import incidents
from gradwatch.replay.restore.warm_start import find_warm_start
from gradwatch.replay.trials.runner import STEPS_AFTER, TrialRunner
from gradwatch.replay.trials.trial_run import TrialRun, run_trial
from gradwatch.replay.verify import verify as verifying
from gradwatch.train.loop import train

pytestmark = [pytest.mark.filterwarnings("ignore:gradwatch"), pytest.mark.filterwarnings("ignore:train.accumulate")]
KEPT = STEP - STEP % 8
"""The step before which the state of the incident was taken."""


def trained(folder, *overrides):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "REST_S", 0.0)
        return train(poisoned(folder, *overrides), log_format="plain").directory


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """Return a run with an incident whose learning rate is constant, for tests that only read it."""
    return trained(tmp_path_factory.mktemp("steady"), "schedule=null", "optim.lr=0.002")


def begun(run, steps, patch=None):
    """Train with a change from the kept state on."""
    warm_start = find_warm_start(run, STEP)
    return run_trial(config_of(run, patch), steps=steps, threads=torch.get_num_threads(), warm_start=warm_start)


@pytest.mark.parametrize("overrides", [[], ["train.precision=fp16"], ["train.accumulate=2", "data.batch_size=8"]])
def test_without_a_change_it_is_the_run_to_the_last_bit(tmp_path, overrides):
    run = trained(tmp_path, *overrides)
    history = read(run)
    first = incidents(run)[0].step

    made = begun(run, first + 6)

    assert made.start_step == KEPT
    assert made.steps == first + 6 - KEPT
    recorded_T = history["loss"][: first + 6]
    np.testing.assert_array_equal(made.history["loss"], recorded_T)
    assert [f.kind for f in made.found(history.findings[0])] == ["non-finite"], "and it is found again"


def test_the_nearest_state_is_taken_from_incidents_and_checkpoints(steady, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(steady, moved)

    steps = [find_warm_start(moved, at).step for at in (STEP, 30, 39)]
    shutil.rmtree(moved / "incidents")

    assert steps == [KEPT, 30, 30]
    assert find_warm_start(moved, STEP) is None, "the checkpoints are later, and the start is no such state"


def test_a_damaged_state_is_passed_over(steady, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(steady, moved)
    (moved / "checkpoints" / "step-000030" / "tensors.safetensors").write_bytes(b"?")

    with pytest.warns(RuntimeWarning, match="step-000030 is damaged"):
        found = find_warm_start(moved, 35)

    assert found.step == KEPT


def test_the_learning_rate_is_changed_from_there_on(steady):
    made = begun(steady, STEP, {"optim.lr": 5e-4})

    rates_T = made.history["lr.0"]
    assert rates_T[KEPT - 1] == 2e-3
    np.testing.assert_allclose(rates_T[KEPT:], 5e-4)
    assert made.history["loss"][KEPT + 1] != read(steady)["loss"][KEPT + 1]


def test_a_schedule_goes_on_with_the_changed_rate(tmp_path):
    run = trained(tmp_path, "schedule={name: step_lr, step_size: 5}", "optim.lr=0.002")

    made = begun(run, STEP, {"optim.lr": 2e-2})
    freed = begun(run, STEP, {"schedule": None, "optim.lr": 1e-3})

    np.testing.assert_allclose(made.history["lr.0"][KEPT:], 10 * read(run)["lr.0"][KEPT:STEP])
    np.testing.assert_allclose(freed.history["lr.0"][KEPT:], 1e-3)


def test_other_settings_of_the_optimizer_hold_from_there_on(steady, tmp_path):
    config = config_of(steady, {"optim.weight_decay": 0.5, "optim.betas": [0.5, 0.9]})
    torch.manual_seed(0)

    with contextlib.ExitStack() as stack:
        session = find_warm_start(steady, STEP).open(config, tmp_path, stack=stack)

    (group,) = session.optimizer.param_groups
    assert (group["weight_decay"], tuple(group["betas"]), group["lr"]) == (0.5, (0.5, 0.9), 2e-3)
    assert session.progress.step == KEPT


def test_larger_batches_go_on_at_the_same_sample(steady, tmp_path):
    with contextlib.ExitStack() as stack:
        session = find_warm_start(steady, STEP).open(config_of(steady, {"data.batch_size": 32}), tmp_path, stack=stack)

    assert session.progress.batch == KEPT * BATCH // 32
    assert KEPT * BATCH < SAMPLES, "the first epoch"


def test_another_loss_scaler_begins_afresh(tmp_path):
    run = trained(tmp_path, "train.precision=fp16", "train.scaler.init_scale=1024")

    with contextlib.ExitStack() as stack:
        config = config_of(run, {"train.scaler.init_scale": 8.0})
        session = find_warm_start(run, STEP).open(config, tmp_path / "new", stack=stack)

    assert session.scaler.get_scale() == 8


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"optim.lr": 1e-4}, True),
        ({"train.clip": {"norm": 1.0}}, True),
        ({"train.precision": "bf16", "train.scaler.enabled": True}, True),
        ({"data.batch_size": 32, "train.accumulate": 2}, True),
        ({"model.dropout": 0.0}, True),
        ({"loss": None}, True),
        ({"schedule": None, "optim.lr": 1e-4}, True),
        ({"model.init": "kaiming"}, False),
        ({"model.activation": "relu", "optim.lr": 1e-4}, False),
        ({"schedule.name": "cosine_annealing"}, False),
        ({"optim.name": "sgd"}, False),
        ({"optim.amsgrad": True}, False),
        ({"optim.groups": []}, False),
        ({"run.seed": 4}, False),
    ],
)
def test_what_decides_the_first_weights_is_tried_from_the_start(steady, patch, expected):
    assert find_warm_start(steady, STEP).supports(patch) is expected


@pytest.mark.parametrize(
    "override", ["schedule={name: OneCycleLR, max_lr: 0.004}", 'optim.groups=[{match: "*.bias", lr: 0.1}]']
)
def test_a_rate_that_others_drive_is_changed_from_the_start(tmp_path, override):
    run = trained(tmp_path, "schedule=null", override)

    assert not find_warm_start(run, STEP).supports({"optim.lr": 1e-4})


def test_a_proof_trains_on_from_the_recorded_state(steady):
    history = read(steady)
    runner = TrialRunner(steady, history, deadline=time.perf_counter() + 60)

    (verification, *_) = verifying.verify(runner, diagnose(history))

    trained_with = [c for t in verification.causes for c in t.experiments if c.change] + [
        c for c in verification.other_experiments if c.change
    ]
    assert trained_with
    late = [c for c in trained_with if c.start_step]
    assert {c.start_step for c in late} <= {KEPT}
    assert all(f"from step {KEPT} on" in c.result for c in late)


def test_what_may_have_begun_long_before_it_was_found_is_tried_from_before_that(steady):
    runner = TrialRunner(steady, read(steady), deadline=math.inf)

    assert runner.warm_start(found("non-finite", STEP)).step == KEPT
    assert runner.warm_start(found("dead-relu", KEPT + STEPS_AFTER - 1)) is None
    assert runner.warm_start(found("dead-relu", KEPT + STEPS_AFTER)).step == KEPT


def found(kind, step):
    return Finding(code="GW999", kind=kind, layer=None, step=step, severity=Severity.WARNING, message="")


class Stage:
    """Stands in for a theatre: ill from the recorded state on, and well from the start, or the other way round."""

    def __init__(self, *, ill_from):
        self.ill_from = ill_from
        self.asked = []

    def steps_for(self, finding):
        return finding.step + STEPS_AFTER

    def run_trial(self, patch, *, steps, warm_start=None):
        start_step = warm_start.step if warm_start else 0
        self.asked.append(start_step)
        history = Synthetic(steps=steps, layers=2).history()
        if start_step in self.ill_from:
            history.report(found("exploding-gradient", 90))
        return TrialRun(history=history, val_loss=1.0, val_accuracy=1.0, seconds=1.0, start_step=start_step)


@pytest.mark.parametrize(
    ("ill_from", "gone", "asked"),
    [((), True, [50]), ((50,), True, [50, 0]), ((50, 0), False, [50, 0])],
)
def test_a_cause_is_refuted_only_where_its_change_does_not_help_from_the_start_either(ill_from, gone, asked):
    stage, warm_start = Stage(ill_from=ill_from), SimpleNamespace(step=50, supports=lambda patch: True)

    check = verifying._try_change(
        stage, found("exploding-gradient", 90), Remedy(text="lower", patch={"optim.lr": 1}), warm_start
    )

    assert check.gone is gone
    assert stage.asked == asked
    assert check.start_step == asked[-1]
