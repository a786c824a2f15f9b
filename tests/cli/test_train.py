"""`gradwatch train`: what it hands to the training, and what its exit code says of it."""

from types import SimpleNamespace

import pytest

from gradwatch.records import Severity


@pytest.fixture
def trained(monkeypatch, history, tmp_path):
    """Put a training in place that only notes what it was asked for; its outcome can be changed."""
    calls = SimpleNamespace(args=None, outcome=SimpleNamespace(directory=tmp_path, ending="finished", history=history))

    def train(config, *, resume, directory, log_format, forecast):
        calls.args = SimpleNamespace(config=config, resume=resume, directory=directory, log_format=log_format)
        return calls.outcome

    monkeypatch.setattr("gradwatch.train.loop.train", train)
    return calls


def test_a_config_is_trained_with_its_overrides(gradwatch, config, trained):
    result = gradwatch("train", config, "--set", "train.steps=7", "--set", "optim.lr=3e-4", "--log-format", "json")

    assert (result.code, result.err) == (0, "")
    assert trained.args.config.train.steps == 7
    assert trained.args.config.optim.options == {"lr": 3e-4}
    assert (trained.args.resume, trained.args.directory, trained.args.log_format) == (None, None, "json")


def test_a_run_is_resumed_with_the_config_in_it(gradwatch, recorded, trained):
    run = recorded()

    result = gradwatch("train", "--resume", run, "--set", "train.steps=9")

    assert result.code == 0
    assert trained.args.resume == run
    assert (trained.args.config.model.name, trained.args.config.train.steps) == ("mlp", 9)


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [
        (Severity.CRITICAL, None, 1),
        (Severity.WARNING, None, 0),
        (Severity.WARNING, "warning", 1),
        (Severity.INFO, "warning", 0),
        (Severity.INFO, "info", 1),
        (Severity.CRITICAL, "never", 0),
    ],
)
def test_findings_as_grave_as_asked_for_are_code_1(gradwatch, config, trained, finding, severity, fail_on, code):
    trained.outcome.history.report(finding(severity))

    assert gradwatch("train", config, *(["--fail-on", fail_on] if fail_on else [])).code == code


def test_an_interrupted_training_is_code_3_and_says_how_to_go_on(gradwatch, config, trained, finding):
    trained.outcome.ending = "interrupted"
    trained.outcome.history.report(finding(Severity.CRITICAL))

    result = gradwatch("train", config)

    assert result.code == 3
    assert result.err == f"note: interrupted; to continue: gradwatch train --resume {trained.outcome.directory}\n"


def test_settings_without_effect_are_said_before_training(gradwatch, config, trained):
    result = gradwatch("train", config, "--set", "train.scaler.init_scale=2")

    assert result.code == 0
    assert result.err.startswith("warning: train.scaler.init_scale: has no effect: only fp16 scales the loss")


def test_nothing_is_trained_where_the_config_is_wrong(gradwatch, config, trained):
    assert gradwatch("train", config, "--set", "model.name=mpl").code == 2
    assert trained.args is None


def test_a_config_and_a_run_to_resume_exclude_each_other(gradwatch, config, recorded, trained):
    result = gradwatch("train", config, "--resume", recorded())

    assert result.code == 2
    assert "give either a config, or --resume with a run directory" in " ".join(result.err.replace("│", "").split())


def test_a_run_that_is_not_there_is_a_mistake_that_suggests_a_near_one(gradwatch, tmp_path):
    (tmp_path / "20260101-mlp").mkdir()

    result = gradwatch("train", "--resume", tmp_path / "20260101-mpl")

    assert result.code == 2
    assert f"there is no run directory {tmp_path}/20260101-mpl; did you mean '20260101-mlp'?" in result.err
