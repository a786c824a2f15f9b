"""What counts as a cure: healthy from two seeds, learning, and if nothing else is left a setting taken back."""

import math

import pytest

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Remedy, Severity
from gradwatch.replay.config_change import config_of, reverted_settings
from gradwatch.replay.cure import find_cure
from gradwatch.replay.trials.trial_run import TrialRun
from gradwatch.replay.verify.result import Experiment, Verification

STEPS = 60
FINDING = Finding(code="GW101", kind="non-finite", layer=None, step=9, severity=Severity.WARNING, message="nan")
LOWER = Remedy(text="lower the rate", patch={"optim.lr": 1e-4})
CLIP = Remedy(text="clip", patch={"train.clip": {"norm": 1.0}})
CONFIG = """
model: {name: mlp, depth: 5, width: 64, activation: tanh, init: normal, init_std: 1.0}
data: {name: synthetic, kind: values, transform: [{Normalize: {mean: [0.0], std: [0.1]}}]}
loss: {name: PoissonNLLLoss, log_input: false}
optim: {name: sgd, lr: 0.1, momentum: 0.999, groups: [{match: "head.*", lr: 0.0}]}
train: {steps: 60, clip: {norm: 1e-6}}
"""


class Stage:
    """Stands for trainings: says what each patch comes to without making it.

    Args:
        run: Directory with a config.
        ill: Says of a patch whether the finding is made with it.
        idle: Says of a patch whether nothing is learnt with it.
    """

    def __init__(self, run, *, ill, idle=lambda patch: False):
        self.run, self.ill, self.idle = run, ill, idle
        self.history = Synthetic(steps=STEPS).history()
        self.asked, self.told = [], []
        self.progress = self.told.append

    def run_trial(self, patch, *, steps):
        assert steps == STEPS, "as long as the run"
        self.asked.append(dict(patch))
        made = Synthetic(steps=STEPS)
        if self.idle(patch):
            made.loss_T[:] = made.loss_T[0]
        history = made.history()
        if self.ill(patch):
            history.report(FINDING)
        return TrialRun(history=history, val_loss=math.nan, val_accuracy=math.nan, seconds=0.0)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def verification(*changes, reproduced=True):
    checks = tuple(Experiment(text=c.text, result="", gone=True, change=c) for c in changes)
    return Verification(
        finding=FINDING,
        control="",
        reproduced=reproduced,
        located=None,
        dependence="",
        causes=(),
        other_experiments=checks,
        seconds=0.0,
    )


def test_each_set_of_changes_is_reported_before_it_is_tried(run):
    stage = Stage(run, ill=lambda patch: patch.keys() != LOWER.patch.keys() | CLIP.patch.keys())

    find_cure(stage, [verification(LOWER, CLIP)])

    assert stage.told[:2] == [
        "testing fix 1 of 2: lower the rate",
        "testing fix 2 of 2: clip",
    ]


def test_what_helps_only_the_runs_own_seed_is_no_cure(run):
    stage = Stage(run, ill=lambda patch: "optim.lr" in patch and patch.get("run.seed") == 1)

    cure = find_cure(stage, [verification(LOWER, CLIP)])

    assert cure.changes == (CLIP,)
    assert cure.left == ()
    assert {"optim.lr": 1e-4, "run.seed": 1} in stage.asked


def test_a_training_that_does_not_learn_is_not_cured_by_having_no_finding(run):
    stage = Stage(run, ill=lambda patch: False, idle=lambda patch: "optim.lr" in patch)

    assert find_cure(stage, [verification(LOWER, CLIP)]).changes == (CLIP,)


def test_the_change_that_learns_is_taken_where_none_is_healthy(run):
    stage = Stage(run, ill=lambda patch: True, idle=lambda patch: "optim.lr" in patch)

    cure = find_cure(stage, [verification(LOWER, CLIP)])

    assert CLIP in cure.changes
    assert cure.left == ("non-finite",)


def test_what_the_config_sets_is_taken_back_where_no_remedy_is_known(run):
    stage = Stage(run, ill=lambda patch: "loss.log_input" not in patch)

    assert find_cure(stage, [verification()]).patch == {"loss.log_input": True}
    assert find_cure(stage, [verification(reproduced=False)]) is None, "what does not come back cannot be seen to go"


def test_settings_that_say_how_are_taken_back_and_those_that_say_how_much_are_not(run):
    patches = [c.patch for c in reverted_settings(config_of(run))]

    assert patches == [
        {"model.activation": "relu"},
        {"model.init": "default"},
        {"model.init_std": 0.02},
        {"loss.log_input": True},
        {"optim.momentum": 0},
        {"loss": None},
        {"data.transform": []},
        {"optim.groups": []},
        {"train.clip": None},
    ]
