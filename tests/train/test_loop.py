"""What the loop records, evaluates, saves and ends on, as its config says."""

import re

import numpy as np
import pytest
import torch

from gradwatch import load_run
from gradwatch.config.load import load_config
from gradwatch.train import checkpoint
from gradwatch.train.loop import new_directory, train

CONFIG = """
run: {{name: loop, out: {out}}}
model: {{name: mlp, depth: 2, width: 16}}
data: {{name: digits, batch_size: 256}}
optim: {{name: adamw, lr: 1e-2}}
train: {{steps: 25}}
sinks: {{terminal: {{enabled: false}}, tensorboard: {{enabled: false}}}}
"""


def run(tmp_path, *overrides):
    path = tmp_path / "loop.yaml"
    path.write_text(CONFIG.format(out=tmp_path / "runs"))
    return train(load_config(path, overrides), log_format="plain")


def test_a_run_directory_begins_with_the_name_and_two_of_one_second_differ(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text(CONFIG.format(out=tmp_path / "runs"))

    names = [new_directory(load_config(path)).name for _ in range(3)]

    assert len(set(names)) == 3
    assert all(re.fullmatch(r"loop-\d{8}-\d{6}(-[23])?", name) for name in names)


def test_every_step_is_recorded_and_validation_once_an_epoch_and_at_the_end(tmp_path):
    history = run(tmp_path).history

    steps, losses = history.steps("val_loss"), history["val_loss"]
    assert steps.tolist() == list(range(25))
    assert steps[~np.isnan(losses)].tolist() == [5, 11, 17, 23, 24], "1,438 samples are 6 batches"
    assert history["val_accuracy"][-1] > 0.5


def test_without_watching_a_curve_of_every_tenth_step_is_left_and_the_training_is_the_same(tmp_path):
    watched, unwatched = run(tmp_path), run(tmp_path, "watch.enabled=false")

    steps = unwatched.history.steps("loss")
    assert steps.tolist() == [0, 5, 10, 11, 17, 20, 23, 24]
    assert unwatched.history["loss"].tolist() == watched.history["loss"][steps].tolist()
    assert unwatched.history.param.layers == ()
    (_, a), (_, b) = (checkpoint.load(o.directory / "checkpoints") for o in (watched, unwatched))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@pytest.mark.parametrize("loss", ["twice", "Twice"])
def test_the_formula_of_a_loss_of_ones_own_is_read(tmp_path, monkeypatch, loss):
    (tmp_path / "own_losses.py").write_text(
        "import torch\n\n\n"
        "def twice(scores, targets):\n"
        "    return torch.nn.functional.cross_entropy(scores.softmax(1), targets)\n\n\n"
        "class Twice(torch.nn.Module):\n"
        "    def forward(self, scores, targets):\n"
        "        return twice(scores, targets)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    history = run(tmp_path, f"loss.target=own_losses:{loss}").history

    assert [(f.kind, f.step) for f in history.findings][:1] == [("probabilities-into-loss", 0)]
    assert "graph-unread" not in {event.kind for event in history.events}


def test_a_gradient_that_explodes_through_a_recurrence_is_reported_as_in_a_loop_of_ones_own(tmp_path, monkeypatch):
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.state, self.head = (torch.nn.Linear(*sizes) for sizes in ((64, 8), (8, 8), (8, 10)))
            self.state.weight.data = 1.3 * torch.eye(8)

        def forward(self, x):
            state = self.read(x.flatten(1))
            for _ in range(40):
                state = self.state(state)
            return self.head(state)

    monkeypatch.setattr("gradwatch.models.mlp.build", lambda spec, **settings: Recurrent())
    history = run(tmp_path, "train.steps=6").history

    (event,) = [event for event in history.events if event.kind == "graph-recurrence"]
    assert event.layer == "state.weight"
    assert event.values["growth"] == pytest.approx(40 * np.log10(1.3), rel=0.3)


def test_checkpoints_are_kept_as_asked_the_last_and_the_best(tmp_path):
    outcome = run(tmp_path, "train.checkpoint.every=4", "train.checkpoint.keep=2", "optim.lr=0.3")

    kept = sorted(path.name for path in (outcome.directory / "checkpoints").glob("step-*"))
    history = outcome.history
    best = int(history.steps("val_loss")[np.nanargmin(history["val_loss"])]) + 1
    assert {"step-000024", "step-000025", f"step-{best:06d}"} == set(kept)


def test_a_checkpoint_that_is_due_is_written_where_a_better_one_is_not_asked_for(tmp_path):
    outcome = run(tmp_path, "train.eval_every=5", "train.checkpoint={every: 5, keep: 9, best: false}")

    assert checkpoint.steps(outcome.directory / "checkpoints") == [5, 10, 15, 20, 25], "the validation loss falls"


def test_it_stops_at_a_loss_that_is_not_finite_where_told_to(tmp_path):
    outcome = run(tmp_path, "optim.name=sgd", "optim.lr=1e30", "train.on_nonfinite=stop")

    assert outcome.ending == "non-finite"
    assert "non-finite" in [f.kind for f in load_run(outcome.directory).findings]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("{name: step, step_size: 10, gamma: 0.1}", [1e-2] * 10 + [1e-3] * 10 + [1e-4] * 5),
        ("{name: step, step_size: 2, gamma: 0.1, per: epoch}", [1e-2] * 12 + [1e-3] * 12 + [1e-4]),
        ("{warmup_steps: 4}", [2e-3, 4e-3, 6e-3, 8e-3] + [1e-2] * 21),
    ],
)
def test_the_learning_rate_of_a_step_is_the_one_it_was_made_with(tmp_path, schedule, expected):
    history = run(tmp_path, f"schedule={schedule}").history

    assert history["lr.0"].tolist() == pytest.approx(expected)
