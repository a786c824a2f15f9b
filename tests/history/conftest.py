"""Small histories to record, and short segments, so that a short run is thinned like a long one."""

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.history import thinning
from gradwatch.history.store import History
from gradwatch.records import ActivationInfo, Finding, LayerInfo, Quantity, RunInfo, Severity


def _run_info(layers=3, activations=2):
    return RunInfo(
        name="test",
        created="2026-01-01T00:00:00+00:00",
        layers=tuple(
            LayerInfo(
                name=f"l{i}", module="", module_type="Linear", shape=(2,), dtype="float32", trainable=True, group=0
            )
            for i in range(layers)
        ),
        activations=tuple(ActivationInfo(name=f"a{i}", module_type="ReLU") for i in range(activations)),
        versions={"gradwatch": "0.1.0"},
    )


def _append(history, step, **run):
    """Record a step whose values follow from its number; activations every 10 steps."""
    rng = np.random.default_rng(step)
    param_SL = rng.standard_normal((len(catalogue.PARAM), len(history.info.layers))).astype(np.float32)
    act_SL = rng.standard_normal((len(catalogue.ACT), len(history.info.activations))).astype(np.float32)
    history.append(step, run={"loss": float(step)} | run, param_SL=param_SL, act_SL=act_SL if step % 10 == 0 else None)


@pytest.fixture
def run_info():
    return _run_info


@pytest.fixture
def append():
    return _append


@pytest.fixture
def recorded():
    def make(steps, **kwargs):
        history = History(_run_info(**kwargs))
        for step in range(steps):
            _append(history, step)
        return history

    return make


@pytest.fixture
def finding():
    def make(step=5, *, layer="l0", severity=Severity.WARNING, value=0.0):
        return Finding(
            code="GW104",
            kind="dead-layer",
            layer=layer,
            step=step,
            severity=severity,
            message="l0 is dead.",
            evidence=(Quantity(key="grad.l2", value=value),),
        )

    return make


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of 64 steps, the shortest there are."""
    monkeypatch.setattr(thinning, "MAX_SEGMENT_BYTES", 1)


@pytest.fixture
def assert_same():
    """Compare all that is kept of two histories, and their findings."""

    def compare(found, expected):
        for name in ("run", "param", "act"):
            (steps_T, values_TSL), (expected_T, expected_TSL) = (
                getattr(found, name).rows(),
                getattr(expected, name).rows(),
            )
            np.testing.assert_array_equal(steps_T, expected_T, err_msg=f"steps of {name}")
            np.testing.assert_array_equal(values_TSL, expected_TSL, err_msg=f"values of {name}")
        assert found.findings == expected.findings
        assert found.events == expected.events
        assert found.info == expected.info

    return compare
