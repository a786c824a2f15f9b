"""Commands as they are called, and small recorded runs for them."""

from dataclasses import dataclass

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.cli import main
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, RunInfo, Severity

CONFIG = """\
model: {name: mlp}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
train: {steps: 3}
"""


# S = statistics, L = layers


def _healthy_SL():
    """Return the statistics of two layers, equal and without anything to report."""
    values = {"grad.zero_frac": 0.0, "grad.nonfinite": 0.0, "grad.mean": 0.0, "weight.l2": 1.0, "update.ratio": 1e-3}
    return np.array([[values.get(name, 0.1)] * 2 for name in catalogue.PARAM_NAMES], np.float32)


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def gradwatch(capsys):
    """Return a function that runs a command and returns its exit code and output."""

    def run(*args):
        code = main([str(a) for a in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mlp.yaml"
    path.write_text(CONFIG)
    return path


def _finding(severity=Severity.WARNING):
    return Finding(
        code="GW103", kind="dead-layer", layer="l1.weight", step=3, severity=severity, message="l1.weight is frozen."
    )


@pytest.fixture
def finding():
    return _finding


@pytest.fixture
def history():
    """Return a short history of two layers, in which nothing was found."""
    layer = {"module_type": "Linear", "shape": (4, 4), "dtype": "float32", "trainable": True, "group": 0}
    info = RunInfo(
        name="mlp",
        created="2026-01-01T00:00:00+00:00",
        layers=tuple(LayerInfo(name=f"l{i}.weight", module=f"l{i}", **layer) for i in range(2)),
    )
    return History(info)


@pytest.fixture
def recorded(tmp_path, history):
    """Return a function that records a run of a few steps with findings, and returns its directory."""

    def record(*findings):
        directory = tmp_path / "run"
        with Writer(directory, history) as writer:
            for step in range(5):
                history.append(step, run={"loss": 1.0 - 0.1 * step}, param_SL=_healthy_SL())
                writer.append()
            for found in findings:
                history.report(found)
                writer.report(found)
        (directory / "config.yaml").write_text(CONFIG)
        return directory

    return record
