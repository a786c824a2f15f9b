"""Early stopping ends a run, says so in the run directory, and is kept by a resume."""

import math
from types import SimpleNamespace

import pytest

from gradwatch import load_run
from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.history.disk import writer
from gradwatch.train import checkpoint, early_stop
from gradwatch.train.loop import train

CONFIG = """
run: {{name: early, out: {out}}}
model: {{name: mlp, depth: 2, width: 16}}
data: {{name: synthetic, batch_size: 50}}
optim: {{name: adamw, lr: 3e-3}}
train: {{steps: 20, threads: 1, eval_every: 2, early_stop: {{metric: val_loss, patience: 2, min_delta: 100.0}}}}
sinks: {{terminal: {{enabled: false}}, tensorboard: {{enabled: false}}, html: {{enabled: false}}}}
"""
SENTENCE = "stopped early at step 6: val_loss has not improved by 100 for 2 evaluations"


@pytest.fixture
def config(tmp_path):
    """Return a function that loads the config, which stops at the third evaluation."""
    path = tmp_path / "early.yaml"
    path.write_text(CONFIG.format(out=tmp_path / "runs"))
    return lambda *overrides: load_config(path, overrides)


@pytest.fixture
def stopped(config):
    return train(config(), log_format="plain")


def test_a_run_says_that_it_stopped_early_and_why(stopped, capsys):
    assert (stopped.ending, stopped.history.step) == ("early-stop", 5), "one evaluation, and two that are no better"
    assert writer.status(stopped.directory) == "finished"
    assert writer.read(stopped.directory).ending.sentence(6) == SENTENCE

    for args in (["diagnose", str(stopped.directory)], ["runs", str(stopped.directory)]):
        assert main(args) == 0
        assert SENTENCE in capsys.readouterr().out


def test_a_resume_makes_no_further_step_and_says_how_to_go_on(stopped, capsys):
    for _ in range(2):
        assert main(["train", "--resume", str(stopped.directory)]) == 0

        assert capsys.readouterr().err == (
            f"warning: the run {SENTENCE}; to continue, resume it with --set train.early_stop=null\n"
        )
    assert load_run(stopped.directory).step == 5
    assert writer.read(stopped.directory).ending.sentence(6) == SENTENCE


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ("train.early_stop=null", 20),
        ("train.early_stop.patience=4", 10),  # 2 evaluations were no better: 2 more are left
        ("train.early_stop.min_delta=50.0", 10),  # another criterion: the count begins again
        ("train.early_stop.metric=loss", 12),  # the best value so far is of another metric
    ],
)
def test_a_run_whose_criterion_changes_goes_on(config, stopped, change, steps):
    again = train(config(change), resume=stopped.directory, log_format="plain")

    assert again.history.step == steps - 1


def test_a_criterion_that_was_taken_away_and_comes_back_counts_from_there(config, stopped):
    train(config("train.early_stop=null", "train.steps=10"), resume=stopped.directory, log_format="plain")

    again = train(config(), resume=stopped.directory, log_format="plain")

    assert again.history.step + 1 == 10 + 2 * 3, "one evaluation, and two that are no better"


def test_a_run_that_is_killed_after_its_last_evaluation_keeps_its_ending(config, stopped):
    header = stopped.directory / "run.json"
    header.write_text(header.read_text().replace('"finished"', '"running"').replace('"early-stop"', '"running"'))

    again = train(config(), resume=stopped.directory, log_format="plain")

    assert (again.ending, again.history.step) == ("early-stop", 5)


def test_an_evaluation_counts_where_an_interrupt_comes_at_the_same_step(config, monkeypatch):
    monkeypatch.setattr("gradwatch.train.recovery.interrupt.Interrupt.__enter__", lambda self: _Requested())
    first = train(config("train.early_stop.patience=1", "train.eval_every=1"), log_format="plain")
    monkeypatch.undo()

    _, state = checkpoint.load(first.directory / "checkpoints")
    assert (first.ending, first.history.step, math.isfinite(state["progress"]["best"])) == ("interrupted", 0, True)


class _Requested:
    requested = True


@pytest.mark.parametrize(
    ("losses", "stops_at"),
    [
        ([math.nan, math.nan, math.nan, math.nan], 2),
        ([math.nan, 0.9, 0.8, 0.7, 0.6], None),
        ([0.5, math.nan, 0.6, 0.7], 2),
        ([math.inf, 0.9, 0.8], None),
    ],
)
def test_any_number_is_better_than_nan(losses, stops_at):
    stop = SimpleNamespace(metric="val_loss", patience=2, min_delta=0.0)
    session = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(early_stop=stop)),
        progress=SimpleNamespace(best=math.inf, stale=0, step=0),
        total_steps=10,
    )

    endings = []
    for loss in losses:
        early_stop.count(session, SimpleNamespace(loss=0.0), SimpleNamespace(loss=loss, accuracy=0.0))
        endings.append(early_stop.ending(session))

    assert next((i for i, ending in enumerate(endings) if ending), None) == stops_at
