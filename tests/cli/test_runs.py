"""`gradwatch runs`: the saved runs with their verdicts."""

import datetime
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from gradwatch import catalogue
from gradwatch.history.disk import writer
from gradwatch.history.disk.run_summary import directories, summarize
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, RunInfo, Severity
from gradwatch.render.common.run_stats import run_stats
from gradwatch.render.terminal.runs import age, print_runs


@pytest.fixture
def record(tmp_path):
    """Return a function that records a run in a folder `runs`."""

    def make(name, *, steps=5, hour=0, val_loss=None, found=(), status="finished", loss=1.0, val_at=0):
        layer = {"module_type": "Linear", "shape": (4, 4), "dtype": "float32", "trainable": True, "group": 0}
        info = RunInfo(
            name=name.rpartition("/")[2],
            created=f"2026-01-01T{hour:02}:00:00+00:00",
            layers=(LayerInfo(name="l.weight", module="l", **layer),),
            total_steps=steps,
        )
        history = History(info)
        writer = Writer(tmp_path / "runs" / name, history)
        for step in range(steps):
            run = {"loss": loss if step == steps - 1 else 9.0}
            if val_loss is not None and step == val_at:
                run |= {"val_loss": val_loss, "val_accuracy": 0.5}
            history.append(step, run=run, param_SL=np.ones((len(catalogue.PARAM_NAMES), 1), np.float32))
            writer.append()
        for kind, severity in found:
            writer.report(Finding(code="GW103", kind=kind, layer="l", step=1, severity=severity, message="It."))
        writer.close(status)
        return tmp_path / "runs" / name

    return make


def _names(result):
    return [run["name"] for run in json.loads(result.out)["runs"]]


def test_a_glance_says_of_a_run_what_reading_it_whole_says(record):
    run = record("run", steps=1500, val_loss=0.25, val_at=70, loss=0.5)

    seen, whole = summarize(run), run_stats(writer.read(run))

    assert (seen.steps, seen.loss, seen.val_loss, seen.val_accuracy) == (
        whole.steps,
        whole.loss,
        whole.val_loss,
        whole.val_accuracy,
    )
    assert (seen.steps, seen.loss, seen.val_loss) == (1500, 0.5, 0.25)


def test_a_run_without_a_step_says_so_and_what_to_do(gradwatch, record):
    run = record("empty", steps=0, status="failed")

    result = gradwatch("diagnose", run)

    assert (result.code, result.out.splitlines()[1]) == (0, "  failed before the first step")
    assert result.err == (
        "note: no step was recorded, so there is nothing to diagnose; call monitor.step(loss) in the loop\n"
    )


def test_a_pattern_that_names_several_runs_says_which_is_the_last(gradwatch, record, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    first, second = record("one"), record("two")

    result = gradwatch("diagnose", first, second)

    assert result.code == 2
    assert f"expected one run: the last of these is {second}" in result.err


def test_each_run_is_a_line_for_other_programs(gradwatch, record, tmp_path):
    record("quick", val_loss=0.25)

    result = gradwatch("runs", tmp_path / "runs")

    assert (result.code, result.err) == (0, "")
    path, status, blame, steps, loss, val_loss, accuracy, since, found, ended = result.out.rstrip("\n").split("\t")
    assert path.endswith("runs/quick")
    assert (status, blame, steps, loss, val_loss, accuracy, found) == (
        "finished", "healthy", "5", "1.00", "0.250", "50 %", "",
    )  # fmt: skip
    assert ended == "finished after 5 steps"
    assert re.fullmatch(r"\d+ d", since)


def test_the_newest_run_comes_first_and_others_orders_can_be_asked_for(gradwatch, record, tmp_path):
    record("a", hour=1, val_loss=0.3, found=[("dead-layer", Severity.WARNING)])
    record("b", hour=3, val_loss=0.1, steps=9)
    record("c", hour=2, found=[("non-finite", Severity.CRITICAL)], steps=7)

    def order(*args):
        return "".join(_names(gradwatch("runs", tmp_path / "runs", "--format", "json", *args)))

    assert order() == "bca"
    assert order("--reverse") == "acb"
    assert order("--sort", "verdict") == "cab"
    assert order("--sort", "name") == "abc"
    assert order("--sort", "steps") == "bca"
    assert order("--sort", "val_loss") == "bac", "c has none"
    assert order("--sort", "val_loss", "--reverse") == "abc", "what is not known stays last"


def test_the_gravest_of_each_kind_is_reported_the_gravest_kind_first(gradwatch, record, tmp_path):
    record(
        "ill",
        found=[("dead-layer", Severity.WARNING), ("non-finite", Severity.INFO), ("non-finite", Severity.CRITICAL)],
    )

    (run,) = json.loads(gradwatch("runs", tmp_path / "runs", "--format", "json").out)["runs"]

    assert run["verdict"] == "critical"
    assert list(run["findings"].items()) == [("non-finite", "critical"), ("dead-layer", "warning")]


def test_a_run_without_a_step_is_not_called_healthy(gradwatch, record, tmp_path):
    record("empty", steps=0, status="failed")

    (run,) = json.loads(gradwatch("runs", tmp_path / "runs", "--format", "json").out)["runs"]

    assert (run["verdict"], run["status"], run["steps"], run["loss"]) == ("unknown", "failed", 0, None)
    assert "unknown" in gradwatch("runs", tmp_path / "runs").out


def _cut(run):
    (run / "run.json").write_text((run / "run.json").read_text()[:200])


def _strip(run):
    data = json.loads((run / "run.json").read_text())
    del data["records"]
    (run / "run.json").write_text(json.dumps(data))


def _age(run):
    data = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(data | {"format": 99}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_cut, "Unterminated string|delimiter|Expecting"),
        (_strip, "'records' is missing"),
        (_age, "format 99 is newer than this gradwatch reads"),
        (lambda run: (run / "run.json").unlink(), "it holds no run.json"),
        (lambda run: (run / "findings.jsonl").write_text("}\n"), "line 1 is not a valid finding"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_listed(gradwatch, record, tmp_path, damage, problem):
    damage(record("bad"))
    record("good")

    result = gradwatch("runs", tmp_path / "runs", "--format", "json")

    assert (result.code, _names(result)) == (0, ["good"])
    (bad,) = json.loads(result.out)["damaged"]
    assert bad["path"].endswith("runs/bad")
    assert re.search(problem, bad["problem"])
    assert "warning: skipped a damaged run" in result.err


def test_runs_in_folders_of_the_folder_are_found_and_nothing_else(gradwatch, record, tmp_path):
    record("sweep/first")
    record("second")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "README.md").write_text("what these are")

    assert set(_names(gradwatch("runs", tmp_path / "runs", "--format", "json"))) == {"first", "second"}
    assert list(directories(tmp_path / "runs" / "second")) == [tmp_path / "runs" / "second"], "a run itself"


def test_a_folder_that_is_not_there_is_a_mistake_and_an_empty_one_is_not(gradwatch, tmp_path):
    missing = gradwatch("runs", tmp_path / "none")
    empty = gradwatch("runs", tmp_path)

    assert missing.code == 2
    assert "there is no such folder" in missing.err
    assert (empty.code, empty.out) == (0, "")
    assert f"no runs in {tmp_path}" in empty.err
    assert json.loads(gradwatch("runs", tmp_path, "--format", "json").out)["runs"] == []


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks on Windows")
def test_a_run_that_goes_on_is_told_from_one_that_was_killed(record):
    run = record("run", status="running")
    assert summarize(run).status == "killed"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"

    with subprocess.Popen(
        [sys.executable, "-c", f"{hold}; input()", run / "history" / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert summarize(run).status == "running"
        other.communicate("\n")


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_fits_the_terminal_and_tells_what_was_found(record, width):
    runs = [
        record("a-long-name-of-a-run-20260101-010203", val_loss=1.0),
        record("b", found=[("vanishing-gradient", Severity.CRITICAL)]),
    ]
    console = Console(file=io.StringIO(), width=width)

    print_runs(console, [summarize(run) for run in runs], now=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))

    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    name = r"a-long-na\S*~010203" if width == 80 else "a-long-name-of-a-run-20260101-010203"
    assert re.match(rf"✔ +{name} +5 .* no problems found *$", lines[1]), "both ends of a name stay"
    assert re.search(r"✖ critical +b +5 .*24 h|1 d +vanishing-gradient", lines[2])
    assert ("val loss" in lines[0]) == (width == 200)


@pytest.mark.parametrize(("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (120, "2 min"), (7300, "2 h"), (2e5, "2 d")])
def test_ages_are_reported_in_their_largest_unit(seconds, text):
    assert age(seconds) == text
