"""`gradwatch diagnose`: what a recorded run is said to suffer from."""

import dataclasses
import json

import pytest

from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.records import Severity


def test_a_healthy_run_is_code_0(gradwatch, recorded):
    result = gradwatch("diagnose", recorded())

    assert (result.code, result.err) == (0, "")
    assert "healthy" in result.out


@pytest.mark.parametrize(
    ("severity", "args", "code"),
    [
        (Severity.WARNING, [], 1),
        (Severity.INFO, [], 0),
        (Severity.WARNING, ["--fail-on", "critical"], 0),
        (Severity.CRITICAL, ["--fail-on", "never"], 0),
    ],
)
def test_findings_as_grave_as_asked_for_are_code_1(gradwatch, recorded, finding, severity, args, code):
    result = gradwatch("diagnose", recorded(finding(severity)), *args)

    assert result.code == code
    assert "l1.weight" in result.out


def test_without_a_run_the_newest_is_diagnosed_and_named(gradwatch, recorded, history, tmp_path, monkeypatch):
    newer = recorded()
    (tmp_path / "runs").mkdir()
    older = newer.rename(tmp_path / "runs" / "z")
    history = History(dataclasses.replace(history.info, created="2026-02-01T00:00:00+00:00"))
    Writer(tmp_path / "runs" / "a", history).close("finished")
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "run.json").write_text("{")
    monkeypatch.chdir(tmp_path)

    result = gradwatch("diagnose", "--format", "json")

    assert older.is_dir()
    assert (result.code, result.err.splitlines()[0]) == (0, "note: no RUN given; using the newest: runs/a")
    assert json.loads(result.out)["run"]["created"] == "2026-02-01T00:00:00+00:00"


@pytest.mark.parametrize("command", ["diagnose", "replay"])
def test_without_a_run_and_without_runs_it_is_a_mistake(gradwatch, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)

    result = gradwatch(command)

    assert result.code == 2
    assert result.err == (
        f"error: {command}: no RUN given, and there is no run under runs/; name a run directory: gradwatch {command} "
        "RUN\n"
    )


def test_json_is_one_document_that_is_never_wrapped(gradwatch, recorded, finding, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")

    result = gradwatch("diagnose", recorded(finding()), "--format", "json")

    document = json.loads(result.out)
    assert [f["kind"] for f in document["findings"]] == ["dead-layer"]
    assert document["verdict"] == "warning"


def test_detecting_again_forgets_what_was_found_before(gradwatch, recorded, finding):
    result = gradwatch("diagnose", recorded(finding()), "--redetect")

    assert result.code == 0, "its two layers are equal and steady"


def test_a_threshold_that_is_set_detects_again(gradwatch, recorded, finding):
    result = gradwatch("diagnose", recorded(finding()), "--set", "detect.dead-layer.enabled=false")

    assert result.code == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("detect.dead-lair.every=1", "did you mean 'dead-layer'?"),
        ("optim.lr=1", "optim.lr: cannot be set here, expected detect.<kind>.<setting>"),
    ],
)
def test_a_wrong_threshold_is_a_mistake(gradwatch, recorded, override, message):
    result = gradwatch("diagnose", recorded(), "--set", override)

    assert result.code == 2
    assert message in result.err


def test_thresholds_of_the_run_s_own_config_hold_when_detecting_again(gradwatch, recorded):
    run = recorded()
    (run / "config.yaml").write_text("detect: {dead-layer: {every: none}}\n")

    result = gradwatch("diagnose", run, "--redetect")

    assert result.code == 2
    assert (
        result.err
        == f"""\
error: detect.dead-layer.every: got 'none', expected a whole number
 --> {run}/config.yaml:1:30
  |
1 | detect: {{dead-layer: {{every: none}}}}
  |                              ^^^^
"""
    )


def test_a_run_without_a_config_is_detected_again_at_the_defaults(gradwatch, recorded):
    run = recorded()
    (run / "config.yaml").unlink()

    assert gradwatch("diagnose", run, "--redetect").code == 0


def test_html_is_a_page_in_the_run_that_is_named(gradwatch, recorded, finding):
    run = recorded(finding())

    result = gradwatch("diagnose", run, "--format", "html")

    assert (result.code, result.out) == (1, f"{run / 'report.html'}\n")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "GW103 dead-layer" in page
    assert "model: {name: mlp}" in page, "the config of the run"


def test_the_page_goes_where_it_is_wanted(gradwatch, recorded, tmp_path):
    run, wanted = recorded(), tmp_path / "mail.html"

    result = gradwatch("diagnose", run, "--format", "html", "--output", wanted)

    assert (result.code, result.out) == (0, f"{wanted}\n")
    assert wanted.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (run / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_mistake_with_a_way_out(gradwatch, recorded, tmp_path):
    wanted = tmp_path / "gone" / "mail.html"

    result = gradwatch("diagnose", recorded(), "--format", "html", "--output", wanted)

    assert (result.code, result.out) == (2, "")
    assert f"{wanted}: cannot be written: no such file or directory; write it elsewhere with --output" in result.err


def test_an_output_that_nothing_is_written_to_is_a_mistake(gradwatch, recorded, tmp_path):
    result = gradwatch("diagnose", recorded(), "--output", tmp_path / "x.html")

    assert result.code == 2
    assert "--output: got" in result.err
    assert "add --format html" in result.err
