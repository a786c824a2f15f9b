"""`gradwatch compare`: two runs side by side."""

import json

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, RunInfo, Severity

CONFIG = "run: {{name: {name}}}\nmodel: {{name: mlp, depth: {depth}}}\noptim: {{name: adamw}}\n"


@pytest.fixture
def record(tmp_path):
    """Return a function that records a run of ten steps, with a loss times `factor` from step 4 on."""

    def make(name, *, factor=1.0, depth=3, found=(), config=True, first=0):
        layer = {"module_type": "Linear", "shape": (4, 4), "dtype": "float32", "trainable": True, "group": 0}
        layers = tuple(LayerInfo(name=f"l{i}.weight", module=f"l{i}", **layer) for i in range(2))
        history = History(RunInfo(name=name, created="2026-01-01T00:00:00+00:00", layers=layers))
        param_SL = np.full((len(catalogue.PARAM_NAMES), 2), 0.1, np.float32)
        with Writer(tmp_path / name, history) as writer:
            for step in range(first, first + 10):
                loss = (1.0 - 0.1 * step) * (factor if step >= 4 else 1.0)
                param_SL[0, 1] = 0.1 * (factor if step >= 4 else 1.0)
                history.append(step, run={"loss": loss}, param_SL=param_SL)
                writer.append()
            for kind in found:
                writer.report(
                    Finding(
                        code="GW103", kind=kind, layer="l1.weight", step=3, severity=Severity.WARNING, message="It."
                    )
                )
        if config:
            (tmp_path / name / "config.yaml").write_text(CONFIG.format(name=name, depth=depth))
        return tmp_path / name

    return make


def test_two_runs_of_the_same_numbers_are_the_same_bit_for_bit(gradwatch, record):
    result = gradwatch("compare", record("one"), record("two"), "--require", "bits")

    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("✔ bit-identical, at all 10 steps that both recorded")
    assert "settings that differ" not in result.out


def test_it_says_where_the_histories_part_and_what_differs(gradwatch, record, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")

    result = gradwatch("compare", record("one"), record("two", factor=100.0, depth=9))

    assert result.code == 0, "no finding is new"
    assert "the runs diverge at step 4" in result.out
    assert "first at step 4 in loss: 0.6 in A, 60 in B; 1 other number as well" in result.out
    assert "bit-identical before that step" in result.out
    assert [line.split() for line in result.out.splitlines() if "model.depth" in line] == [["model.depth", "3", "9"]]
    assert "run.name" not in result.out
    assert "l1.weight   100x larger in B" in result.out
    assert "l0.weight" not in result.out


def test_a_finding_that_is_new_in_the_second_run_is_code_1(gradwatch, record):
    healthy, ill = record("healthy"), record("ill", found=["dead-layer"])

    result = gradwatch("compare", healthy, ill)

    assert result.code == 1
    assert "only in B   ▲ GW103 dead-layer in l1.weight, step 3" in result.out
    assert gradwatch("compare", ill, healthy).code == 0, "a cure"
    assert gradwatch("compare", healthy, ill, "--fail-on", "critical").code == 0
    assert "in both" in gradwatch("compare", ill, ill).out


@pytest.mark.parametrize(
    ("factor", "require", "code"),
    [(1.0, "bits", 0), (1 + 1e-7, "bits", 1), (1 + 1e-7, "rounding", 0), (1.1, "rounding", 1), (1.1, "nothing", 0)],
)
def test_how_much_the_same_they_must_be_can_be_required(gradwatch, record, factor, require, code):
    assert gradwatch("compare", record("one"), record("two", factor=factor), "--require", require).code == code


def test_a_tolerance_can_be_given(gradwatch, record):
    runs = record("one"), record("two", factor=1.1)

    assert gradwatch("compare", *runs, "--require", "rounding", "--tolerance", "0.2").code == 0


def test_runs_without_a_step_in_common_are_not_called_the_same(gradwatch, record):
    result = gradwatch("compare", record("one"), record("two", first=10), "--require", "rounding")

    assert result.code == 1
    assert "no recorded step in common" in result.out


def test_json_is_one_strict_document(gradwatch, record):
    runs = record("one"), record("two", factor=100.0, depth=9, found=["dead-layer"])

    result = gradwatch("compare", *runs, "--format", "json")

    document = json.loads(result.out, parse_constant=lambda constant: pytest.fail(constant))
    assert document["same"] == "no"
    assert document["parting"]["rounding"] == {
        "step": 4,
        "statistic": "loss",
        "layer": None,
        "first": pytest.approx(0.6),
        "second": pytest.approx(60),
        "others": 1,
    }
    assert document["settings"] == {"model.depth": [3, 9]}
    assert [run["verdict"] for run in document["runs"]] == ["healthy", "warning"]
    assert document["layers"][0]["layer"] == "l1.weight"


def test_runs_of_a_loop_of_one_s_own_are_compared_by_what_is_known_of_them(gradwatch, record):
    result = gradwatch("compare", record("one"), record("two", config=False), "--format", "json")

    assert set(json.loads(result.out)["settings"]) == {"model.name", "model.depth", "optim.name"}


def test_a_run_that_is_not_there_is_a_mistake(gradwatch, record):
    run = record("one")

    result = gradwatch("compare", run, run.with_name("oen"))

    assert result.code == 2
    assert "there is no such run directory; did you mean 'one'?" in result.err


def test_a_setting_in_british_spelling_is_the_american_one(gradwatch, record):
    runs = [record("old"), record("new")]
    for run, word in zip(runs, ("normalisation", "normalization"), strict=True):
        (run / "config.yaml").write_text(f"model: {{name: mlp, {word}: batch}}\n")

    data = json.loads(gradwatch("compare", *runs, "--format", "json").out)

    assert data["settings"] == {}


def test_a_run_that_is_too_short_to_be_judged_is_not_called_healthy(gradwatch, record):
    result = gradwatch("compare", record("one"), record("two"))

    (verdicts,) = (line for line in result.out.splitlines() if line.startswith("verdict"))
    assert verdicts.count("✔ no problems found") == 2
    assert gradwatch("diagnose", record("three")).out.startswith("✔ no problems found"), "in the same words"
