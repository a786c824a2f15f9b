"""Made-up runs to render: a healthy one, one that vanishes, one that breaks; and consoles to render them on."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from rich.console import Console

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import ActivationInfo, Diagnosis, Finding, Quantity, Remedy, Severity

STEPS = 120


@dataclass(frozen=True)
class Run:
    """A history with the diagnoses of it."""

    history: History
    diagnoses: tuple[Diagnosis, ...] = ()


def finding(kind: str, *, layer: str | None, step: int, severity: Severity, code: str, **evidence: float) -> Finding:
    return Finding(
        code=code,
        kind=kind,
        layer=layer,
        step=step,
        severity=severity,
        message=f"This is what {kind} means.",
        evidence=tuple(Quantity(key=name.replace("__", "."), value=value) for name, value in evidence.items()),
    )


@pytest.fixture(scope="session")
def healthy() -> Run:
    run = Synthetic(layers=4, steps=STEPS, activations=2)
    run.val_loss_T[[23, 47, 71, 95, 119]] = [1.2, 1.0, 0.9, 0.8, 0.7]
    run.val_accuracy_T[[23, 47, 71, 95, 119]] = [0.61, 0.7, 0.78, 0.83, 0.875]
    run.info = replace(run.info, name="quick", total_steps=STEPS)
    return Run(run.history())


@pytest.fixture(scope="session")
def vanishing() -> Run:
    run = Synthetic(layers=24, steps=STEPS, activations=2).vanishing(decades=9, onset=40).saturated(0, onset=30)
    run.info = replace(run.info, name="deep", total_steps=STEPS)
    history = run.history()
    found = [
        finding(
            "vanishing-gradient",
            layer=f"layers.{i}.weight",
            step=44 + i,
            severity=Severity.CRITICAL,
            code="GW101",
            grad__l2=3.1e-9,
            decades=8.4,
        )
        for i in range(14)
    ]
    found.append(
        finding(
            "saturated-activation",
            layer="acts.0",
            step=35,
            severity=Severity.WARNING,
            code="GW203",
            act__saturated_frac=0.95,
        )
    )
    for each in found:
        history.report(each)
    cause = Diagnosis(
        cause="saturating activations in a deep network",
        certainty=0.87,
        findings=tuple(found),
        because="Each sigmoid passes at most a quarter of the gradient.",
        confirm="Train 200 steps with relu.",
        remedies=(
            Remedy(text="Use ReLU", patch={"model.activation": "relu", "model.residual": True}),
            Remedy(text="Add normalisation", patch={"model.normalization": "batch"}),
        ),
        source="Glorot and Bengio 2010",
    )
    return Run(history, (cause,))


@pytest.fixture(scope="session")
def broken() -> Run:
    run = Synthetic(layers=6, steps=STEPS, precision="fp16").no_gradient(2).dead(3, onset=50)
    run.non_finite(step=100, layers=0, lasting=True)
    run.skipped_T[100:] = 1
    run.loss_scale_T[100:] = 65536 * 0.5 ** np.arange(20)
    run.info = replace(run.info, name="broken", total_steps=1000)
    history = run.history()
    history.report(
        finding(
            "non-finite",
            layer="layers.0.weight",
            step=100,
            severity=Severity.CRITICAL,
            code="GW001",
            grad__nonfinite=float("nan"),
        )
    )
    history.report(finding("dead-layer", layer="layers.3.weight", step=60, severity=Severity.WARNING, code="GW104"))
    history.report(finding("loss-plateau", layer=None, step=70, severity=Severity.INFO, code="GW507"))
    return Run(history)


@pytest.fixture
def make_console() -> Callable[..., Console]:
    def make(width: int = 80, *, terminal: bool = False, encoding: str | None = None, height: int = 40) -> Console:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding else io.StringIO()
        return Console(
            file=file,
            width=width,
            height=height,
            force_terminal=terminal,
            color_system="truecolor" if terminal else None,
            _environ={"TERM": "xterm-256color"},
        )

    return make


@pytest.fixture
def written() -> Callable[[Console], str]:
    def text(console: Console) -> str:
        console.file.seek(0)
        return console.file.read()

    return text


@pytest.fixture
def make_finding() -> Callable[..., Finding]:
    return finding


@pytest.fixture
def grow() -> Callable[..., History]:
    """Return a function that yields a history anew, step by step, as a live run would grow it."""

    def steps(source: History, *, activations: tuple[ActivationInfo, ...] | None = None):
        history = History(source.info, groups=source.groups)
        (steps_T, param_TSL), run_TS = source.param.rows(), source.run.rows()[1][:, :, 0]
        act_row = dict(
            zip(*(part.tolist() if i == 0 else part for i, part in enumerate(source.act.rows())), strict=True)
        )
        for i, step in enumerate(steps_T.tolist()):
            run = dict(zip(source.run.statistics, run_TS[i].tolist(), strict=True))
            history.append(step, run=run, param_SL=param_TSL[i], act_SL=act_row.get(step))
            yield history

    return steps
