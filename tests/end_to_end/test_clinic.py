"""Every config of the clinic is diagnosed as its second line expects, from the run on disk."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.detect import detectors
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import read
from gradwatch.render.terminal.summary import print_summary
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[2]
CLINIC = ROOT / "configs" / "clinic"
WIDTH = 80
MAX_LINES = 19
"""Most lines of a summary, which leaves a screen of 24 lines room for the findings above it."""
EXPECT = re.compile(r"^# expect: (?P<kind>[a-z0-9-]+)(?: \((?P<code>GW\d{3})\)(?: in (?P<layer>\S+))?)?$")
"""The second line of a config: what it must be diagnosed as, and where its layer's name begins unless it is the run."""


def expected(path):
    """Return what the second line of a config expects: the kind, its code and the start of the layer's name."""
    line = path.read_text().splitlines()[1]
    match = EXPECT.match(line)
    assert match, f"{path.name}: {line!r} does not say what is expected"
    return match["kind"], match["code"], match["layer"]


EXPECTED = {path.stem: expected(path) for path in sorted(CLINIC.glob("*.yaml"))}
ILL = [name for name, (kind, _, _) in EXPECTED.items() if kind != "healthy"]
HEALTHY = [name for name, (kind, _, _) in EXPECTED.items() if kind == "healthy"]


def diagnosed(directory, capsys):
    capsys.readouterr()
    code = main(["diagnose", str(directory), "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_fault_is_of_a_known_kind_and_has_a_cure():
    codes = {d.kind: d.code for d in detectors()}

    assert {name: EXPECTED[name][:2] for name in ILL} == {name: (name, codes[name]) for name in ILL}
    assert [f"{name}.cured" for name in ILL] == HEALTHY
    assert len(ILL) == 6


def assert_one_screen(directory, cause):
    """Check that the summary has cause, fix and evidence on one screen of 80 columns, and says nothing twice."""
    console = Console(file=io.StringIO(), width=WIDTH)
    history, run_dir = read(directory), Path("runs") / directory.name
    print_summary(console, history, diagnose(history), run_dir=run_dir)
    text = console.file.getvalue()
    lines = text.splitlines()

    assert sum(math.ceil(len(line) / WIDTH) or 1 for line in lines) <= MAX_LINES, text
    assert re.match(r"[▲✖] 1 problem \((warning|critical)\): " + cause, lines[0])
    assert [line for line in lines if len(line) > WIDTH and "gradwatch train" not in line] == []
    assert {"fix", "found", "evidence"} <= {line[:10].strip() for line in lines}
    assert lines[-1].endswith(f"gradwatch diagnose {run_dir} --full")
    sentences = [s for s in re.split(r"[.;:]\s", " ".join(text.split())) if len(s.split()) > 3]
    assert len(sentences) == len(set(sentences))


@pytest.mark.parametrize("name", ILL)
def test_a_fault_is_diagnosed_as_what_it_is(name, clinic_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    directory, live = clinic_run(name, tmp_path / "runs")

    code, said = diagnosed(directory, capsys)

    kind, kind_code, layer = EXPECTED[name]
    first = said["diagnoses"][0]
    loud = [f for f in first["findings"] if f["kind"] == kind and f["severity"] != "info"]
    assert loud, f"the first diagnosis explains {[f['kind'] for f in first['findings']]}"
    assert {f["code"] for f in loud} == {kind_code}
    assert any((f["layer"] or "").startswith(layer or "") for f in loud)
    assert code == 1
    assert first["remedies"], "a diagnosis says what to change"
    assert [f["message"] for f in said["findings"]] == live, "the saved run answers what the live run said"
    monkeypatch.chdir(tmp_path)  # commands are short where the runs are below the working directory
    assert_one_screen(directory, first["cause"])


@pytest.mark.parametrize("name", HEALTHY)
def test_a_cure_is_healthy(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    config = load_config(CLINIC / f"{name}.yaml", [f"run.out={tmp_path / 'runs'}"])

    code, said = diagnosed(train(config, log_format="plain").directory, capsys)

    assert (code, said["verdict"]) == (0, "healthy"), [f["message"] for f in said["findings"]]
