"""How long report.html takes for a long run, and how large it is: `python scripts/benchmarks/report.py`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from history import history_of

from gradwatch import catalogue
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History
from gradwatch.records import Finding, Severity
from gradwatch.render.report.sink import write_report

STEPS, TENSORS, ACTIVATIONS = 100_000, 200, 100
NOISE = 0.5
"""Standard deviation of the natural logarithm of every statistic from step to step: noise is what packs worst."""


def long_run() -> History:
    """Return the history of a long run in which every statistic is noise, with one spike that was found."""
    history = history_of(TENSORS, ACTIVATIONS, total_steps=STEPS)
    random = np.random.default_rng(0)
    for step in range(STEPS):
        param_SL = np.exp(NOISE * random.standard_normal(history.param.shape)).astype(np.float32)
        param_SL[catalogue.PARAM_NAMES.index("grad.nonfinite")] = 0
        act_SL = random.random(history.act.shape, dtype=np.float32) if step % 10 == 0 else None
        if step == STEPS // 2:
            param_SL[catalogue.PARAM_NAMES.index("grad.l2"), 0] = 1e6
        history.append(step, run={"loss": 1.0, "watch_ms": 0.1, "step_ms": 10.0}, param_SL=param_SL, act_SL=act_SL)
        if step == STEPS // 2:
            layer, told = "blocks.0.weight", "a spike"
            history.report(
                Finding(
                    code="GW106",
                    kind="gradient-spike",
                    layer=layer,
                    step=step,
                    severity=Severity.WARNING,
                    message=told,
                )
            )
    return history


def main() -> None:
    """Write the report of a long run a few times, and print the fastest."""
    history = long_run()
    diagnoses = diagnose(history)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        for _ in range(5):
            began = time.perf_counter()
            write_report(path, history, diagnoses)
            taken.append(time.perf_counter() - began)
        size = path.stat().st_size
    print(f"{STEPS:,} steps, {TENSORS} tensors, {ACTIVATIONS} activations")
    print(f"writing    {min(taken):.2f} s, the first time {taken[0]:.2f} s")
    print(f"size       {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
