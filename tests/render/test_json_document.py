"""Diagnoses for programs."""

import json
import math

import numpy as np
import pytest

from gradwatch.history.store import History
from gradwatch.records import RunInfo
from gradwatch.render.json_document import VERSION, dumps, line


def _strictly(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_document_has_everything_that_the_terminal_shows(vanishing):
    data = _strictly(dumps(vanishing.history, vanishing.diagnoses))

    assert data["version"] == VERSION == 1
    assert data["verdict"] == "critical"
    assert data["step"] == 119
    assert data["run"]["name"] == "deep"
    assert data["facts"]["steps"] == 120
    assert len(data["findings"]) == 15
    first = data["findings"][0]
    assert (first["code"], first["kind"], first["layer"], first["step"], first["severity"]) == (
        "GW101",
        "vanishing-gradient",
        "layers.0.weight",
        44,
        "critical",
    )
    assert first["evidence"][0] == {"key": "grad.l2", "name": "grad.l2", "value": 3.1e-9, "unit": ""}
    cause = data["diagnoses"][0]
    assert cause["certainty"] == 0.87
    assert cause["severity"] == "critical"
    assert cause["remedies"][0]["patch"] == {"model.activation": "relu", "model.residual": True}


def test_numbers_that_json_does_not_know_are_null(broken):
    data = _strictly(dumps(broken.history, ()))

    assert data["facts"]["loss"] is None, "the loss is NaN at the end"
    assert data["findings"][0]["evidence"][0]["value"] is None


def test_a_healthy_run_says_so(healthy):
    data = _strictly(dumps(healthy.history, ()))

    assert data["verdict"] == "healthy"
    assert data["findings"] == data["diagnoses"] == []


def test_a_run_without_steps_is_a_document_too():
    assert _strictly(dumps(History(RunInfo(name="x", created="", layers=())), ()))["step"] == -1


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        ((1, "a"), [1, "a"]),
        ({3: None}, {"3": None}),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_a_line_holds_plain_values_only(value, read):
    text = line("step", {"value": value})

    assert "\n" not in text
    assert _strictly(text) == {"event": "step", "value": read}


def test_a_run_without_a_step_is_neither_healthy_nor_ill():
    empty = History(RunInfo(name="early", created="", layers=()))

    assert json.loads(dumps(empty, ()))["verdict"] == "unknown"
