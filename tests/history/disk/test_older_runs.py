"""Run directories of gradwatch 0.1 stay readable: `gradwatch train` and a loop under `gradwatch.watch` wrote them."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import warm_python

import gradwatch
from gradwatch.detect import detectors
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import CHANCE
from gradwatch.history.disk.run_summary import summarize
from gradwatch.history.disk.writer import read
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Severity

DATA = Path(__file__).parents[1] / "data"

KEYS = {
    "run-0.1-train": {
        "vanishing-gradient": [
            "depth.fall_decades",
            "depth.fall_per_module_decades",
            "modules",
            "grad.element.first",
            "grad.element.last",
        ]
    },
    "run-0.1-watch": {
        "poor-initialization": ["gain", "init.large_layers", "loss.step_0"],
        "probabilities-into-loss": ["loss", "loss.floor", "classes"],
        "dead-relu": ["act.dead_frac", "act.dead_frac.before", "act.silent"],
    },
}
"""Evidence of each finding by today's keys. The files hold English names instead."""

CAUSES = {
    "run-0.1-train": "saturating-stack",
    "run-0.1-watch": "probabilities-as-scores",
}


@pytest.fixture(params=sorted(KEYS))
def run(request, tmp_path):
    """A copy of an older run directory."""
    return shutil.copytree(DATA / request.param, tmp_path / request.param)


def test_an_older_run_loads_with_all_its_rows(run):
    loaded = gradwatch.load_run(run)

    assert len(loaded["loss"]) == 40
    assert np.isfinite(loaded["loss"]).all()
    assert np.isfinite(loaded["grad.l2"]).all()


def test_evidence_of_an_older_run_has_todays_keys(run):
    history = read(run)

    assert {f.kind: [q.key for q in f.evidence] for f in history.findings} == KEYS[run.name]


def test_evidence_of_an_older_run_keeps_the_words_for_people(run):
    labels = {q.label for f in read(run).findings for q in f.evidence}

    assert labels & {"fall over depth", "lowest loss that it can reach"}


def test_events_of_an_older_run_are_read(run):
    (chance,) = (e for e in read(run).events if e.kind == CHANCE.name)

    assert chance.values["classes"] in (4, 10)


def test_an_older_run_is_diagnosed_by_its_keys(run):
    assert CAUSES[run.name] in {d.cause_id for d in diagnose(read(run))}


def test_detectors_find_in_an_older_run_what_was_found_then(run):
    history = read(run)

    again = redetect(history, detectors())

    # in any order: of one step, causes come first today
    assert {(f.kind, f.layer, f.step, f.severity) for f in again.findings} == {
        (f.kind, f.layer, f.step, f.severity) for f in history.findings
    }


def test_an_older_run_is_listed(run):
    summary = summarize(run)

    assert (summary.status, summary.found) == ("finished", {f.kind: f.severity for f in read(run).findings})


def test_diagnose_ends_with_the_exit_code_of_the_worst_finding(run):
    command = [*warm_python.command(), "-m", "gradwatch", "diagnose", str(run), "--full", "--fail-on", "critical"]
    worst = max(f.severity for f in read(run).findings)

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == (1 if worst is Severity.CRITICAL else 0), done.stderr
    for kind in KEYS[run.name]:
        assert kind in done.stdout
