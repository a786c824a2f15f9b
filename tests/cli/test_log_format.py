"""`gradwatch train --log-format json`: what another program reads of a training."""

import json

import pytest

from gradwatch import catalogue


@pytest.fixture
def events(gradwatch, config, tmp_path):
    """Return a function that trains three steps and returns exit code, parsed lines of standard output, and errors."""

    def train(*overrides):
        settings = [f"run.out={tmp_path}", "sinks.terminal.every=1", "sinks.tensorboard.enabled=false", *overrides]
        args = [part for setting in settings for part in ("--set", setting)]
        result = gradwatch("train", config, *args, "--fail-on", "never", "--log-format", "json")
        lines = result.out.splitlines()
        return result.code, [json.loads(line, parse_constant=pytest.fail) for line in lines], result.err

    return train


def test_every_line_is_an_object_and_the_last_one_is_the_whole_diagnosis(events):
    code, lines, _ = events()

    assert code == 0
    assert [line["event"] for line in lines] == ["step", "step", "step", "end"]
    assert [line["step"] for line in lines[:3]] == [0, 1, 2]
    assert {s.name for s in catalogue.RUN} <= lines[0].keys()
    assert {"version", "run", "step", "verdict", "facts", "findings", "diagnoses"} <= lines[-1].keys()
    assert lines[-1]["verdict"] == "healthy"


def test_numbers_that_json_does_not_know_are_null_and_findings_come_as_they_are_made(events):
    _, lines, _ = events("train.steps=12", "optim.lr=1e20", "train.on_nonfinite=continue")

    assert lines[-1]["verdict"] == "critical"
    found = [line for line in lines if line["event"] == "finding"]
    assert found
    assert {"code", "kind", "layer", "step", "severity", "message", "evidence"} <= found[0].keys()
    assert any(line["loss"] is None for line in lines if line["event"] == "step")


def test_warnings_are_on_standard_error(events):
    _, lines, err = events("train.scaler.init_scale=2")

    assert "warning: train.scaler.init_scale: has no effect" in err
    assert len(lines) == 4


def test_a_training_that_breaks_before_its_first_step_is_not_called_healthy(events):
    code, lines, _ = events("optim.lr=1e38")  # no update: torch refuses the number

    assert code == 70
    assert [(line["event"], line["step"], line["verdict"]) for line in lines] == [("end", -1, "unknown")]
