"""The fault zoo lists its cases, scores them, and rejects names that it does not know."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import warm_python

import gradwatch
from gradwatch.detect import detector_classes, detectors
from gradwatch.events import UNSTABLE
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from scripts.fault_zoo import worker
from scripts.fault_zoo.__main__ import main
from scripts.fault_zoo.case_sets import SETS, load_set
from scripts.fault_zoo.judge import are_losses_equal, is_same_place, judge
from scripts.fault_zoo.on_device import on_device
from scripts.fault_zoo.protocol import FAULTS, Case, Finding

ROOT = Path(__file__).parents[2]


def run_zoo(*options):
    command = [*warm_python.command(), "-m", "scripts.fault_zoo", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "faulty", "healthy"),
    [
        ("dev", 37, 37),
        ("opened", 55, 54),
        ("published", 5, 5),
        ("practice", 24, 24),
        ("forums", 24, 24),
        ("mailing", 22, 22),
        ("trackers", 24, 24),
        ("questions", 24, 24),
        ("threads", 24, 24),
        ("fixes", 24, 24),
        ("stories", 20, 20),
        ("advice", 20, 20),
        ("diaries", 20, 20),
    ],
)
def test_a_set_has_its_cases(name, faulty, healthy):
    cases = load_set(name)

    assert sum(case.fault is not None for case in cases) == faulty
    assert sum(case.fault is None for case in cases) == healthy
    assert all(case.run.__doc__ for case in cases), "each script says what it does"


def test_case_names_are_unique_over_all_sets():
    names = [case.name for name in SETS for case in load_set(name)]

    assert len(names) == len(set(names))


def test_a_faulty_and_a_healthy_script_give_their_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "INTERPRETER", warm_python.command())
    scores, kept = tmp_path / "scores.json", tmp_path / "kept"
    cases = ["--set", "dev", "--set", "published", "--only", "wine_step_loop", "--only", "first_layer_frozen_fixed"]

    exit_code = main([*cases, "--jobs", "2", "--json", str(scores), "--keep", str(kept)])

    printed = capsys.readouterr()
    assert exit_code == 0, printed.err
    assert "| dev | gradwatch | 1/1 (100%) | 1/1 (100%) | - | 4 | - | 0/1 (0%) |" in printed.out
    assert "| published | gradwatch | - | - | - | - | 0/1 (0%) | 0/1 (0%) |" in printed.out
    assert "dev, gradwatch, missed: none" in printed.out
    rows = {row["case"]: row for row in json.loads(scores.read_text())["rows"]}
    assert rows["wine_step_loop"]["findings"][0]["kind"] == "constant-batch"
    found = gradwatch.load_run(kept / "dev" / "wine_step_loop").findings
    assert [f.kind for f in found] == [f["kind"] for f in rows["wine_step_loop"]["findings"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--set", "devv"),
            "error: --set: got 'devv', expected one of dev, opened, published, reports, practice, forums, mailing, "
            "trackers, questions, threads, fixes, stories, advice, diaries; ",
        ),
        (("--only", "no-such-case"), "error: --only: no case of dev matches no-such-case\n"),
        (("--monitor", "no.module:attach"), "error: --monitor: 'no.module:attach' cannot be imported: "),
    ],
)
def test_a_wrong_name_gives_one_error(options, message, capsys):
    exit_code = main(options)

    printed = capsys.readouterr()
    assert exit_code == 2
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_the_command_line_passes_its_exit_code_on():
    done = run_zoo("--set", "devv")

    assert done.returncode == 2
    assert done.stderr.startswith("error: --set: got 'devv'")


def case_with(**facts):
    return Case("case", lambda attach: None, **{"fault": "exploding-gradient", "onset": 40} | facts)


def test_a_finding_long_before_the_onset_finds_nothing():
    early, late = (Finding("exploding-gradient", None, step, "warning") for step in (35, 36))

    assert not judge(case_with(), [early]).is_found
    assert judge(case_with(), [early]).wrong_kinds == ("exploding-gradient (early)",)
    assert judge(case_with(), [late]).steps_to_detection == 0


def test_the_most_severe_finding_comes_first():
    right = Finding("exploding-gradient", "fc", 40, "warning")
    worse = Finding("non-finite", "fc", 60, "critical")

    assert judge(case_with(), [right]).is_right_first
    assert not judge(case_with(), [right, worse]).is_right_first
    assert judge(case_with(tolerate=("non-finite",)), [right, worse]).is_right_first


def test_a_healthy_script_tolerates_only_what_it_names():
    alarm = Finding("loss-plateau", None, 5, "warning")
    info = Finding("dead-relu", None, 5, "info")

    assert judge(case_with(fault=None), [alarm, info]).wrong_kinds == ("loss-plateau",)
    assert judge(case_with(fault=None, tolerate=("loss-plateau",)), [alarm]).wrong_kinds == ()


@pytest.mark.parametrize(
    ("layer", "is_same"),
    [("blocks.3.fc.weight", True), ("blocks", True), ("blocks.30", False), ("", False), (None, False)],
)
def test_layers_match_at_their_dots(layer, is_same):
    assert is_same_place(layer, ["blocks.3"]) == is_same


def test_nan_losses_are_equal():
    assert are_losses_equal([1.0, float("nan")], [1.0, float("nan")])
    assert not are_losses_equal([1.0], [1.0, 1.0])
    assert not are_losses_equal([1.0], [float("nan")])


def test_the_zoo_has_a_word_for_each_kind_that_one_process_may_report():
    kinds = {cls.kind for cls in detector_classes() if ".ranks." not in cls.__module__}

    assert kinds == FAULTS.keys(), "the worker refuses a finding of another kind"


def test_an_adapter_leaves_out_the_kinds_that_the_outer_zoo_has_no_word_for(monkeypatch):
    protocol = ModuleType("zoo.protocol")
    protocol.FAULTS, protocol.Finding = {"dead-layer": "a layer is dead"}, Finding
    monkeypatch.setitem(sys.modules, "zoo.protocol", protocol)
    monkeypatch.delitem(sys.modules, "scripts.zoo_adapter", raising=False)
    adapter = importlib.import_module("scripts.zoo_adapter").Adapter
    history = Synthetic(steps=120).dead(5, onset=60).add_event(UNSTABLE, text="log(softmax(x))").history()

    assert {finding.kind for finding in redetect(history, detectors()).findings} == {"dead-layer", "unstable-formula"}
    monitor = SimpleNamespace(findings=lambda: redetect(history, detectors()).findings)
    assert [(f.kind, f.layer) for f in adapter(monitor).findings()] == [("dead-layer", "layers.5.weight")]


def test_a_script_that_names_no_device_runs_on_another():
    with on_device("meta"):
        made = [torch.zeros(2), torch.from_numpy(np.ones(2)), torch.Generator(device="cpu")]
        drawn = torch.randperm(4, generator=made[-1])
        annotation = torch.Generator | None

    assert "Generator" in str(annotation)
    assert [it.device.type for it in made] == ["meta", "meta", "cpu"]
    assert drawn.device.type == "meta"
    assert torch.from_numpy(np.ones(2)).device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)
