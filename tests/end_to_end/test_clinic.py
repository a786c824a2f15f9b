"""Every illness of the clinic is diagnosed as what its file is called, from the run on disk; every cure is healthy."""

import json
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[2]
ILL = {
    "dead-relu": "blocks.0.act",
    "exploding-gradient": "blocks.",
    "fp16-underflow": "blocks.0",
    "no-gradient": "columns",
    "non-finite": None,
    "vanishing-gradient": "blocks.0.linear",
}
"""The illness, and where the layer's name begins that it must be found in; None for the whole run."""


def train_and_diagnose(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs" / "clinic" / f"{name}.yaml", [f"run.out={tmp_path}"])
    outcome = train(config, log_format="plain")
    capsys.readouterr()
    code = main(["diagnose", str(outcome.directory), "--format", "json"])
    return code, json.loads(capsys.readouterr().out), outcome


def test_every_config_of_the_clinic_is_examined_here():
    found = {path.stem for path in (ROOT / "configs" / "clinic").glob("*.yaml")}

    assert found == {*ILL, *(f"{name}.cured" for name in ILL)}


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_diagnosed_as_what_it_is(name, tmp_path, monkeypatch, capsys):
    code, said, outcome = train_and_diagnose(name, tmp_path, monkeypatch, capsys)

    first = said["diagnoses"][0]
    loud = [f for f in first["findings"] if f["kind"] == name and f["severity"] != "info"]
    assert loud, f"the first diagnosis explains {[f['kind'] for f in first['findings']]}"
    assert any((f["layer"] or "").startswith(ILL[name] or "") for f in loud)
    assert code == 1
    assert first["remedies"], "a diagnosis says what to change"
    assert [f["message"] for f in said["findings"]] == [f.message for f in outcome.history.findings], (
        "the saved run answers what the live run said"
    )


@pytest.mark.parametrize("name", ILL)
def test_its_cure_is_healthy(name, tmp_path, monkeypatch, capsys):
    code, said, _ = train_and_diagnose(f"{name}.cured", tmp_path, monkeypatch, capsys)

    assert (code, said["verdict"]) == (0, "healthy"), [f["message"] for f in said["findings"]]
