"""Run one case under one monitor in an interpreter of its own.

    python -m scripts.fault_zoo.worker JOB RESULT

JOB and RESULT are JSON files: a `Job` is read from the first, a `CaseRun` is written to the second.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from scripts.fault_zoo import protocol
from scripts.fault_zoo.monitors import find_factory
from scripts.fault_zoo.on_device import on_device
from scripts.fault_zoo.protocol import Finding, Monitor

ROOT = Path(__file__).parents[2]
INTERPRETER = (sys.executable,)
MAX_NOISE_CHARS = 1500


@dataclass(frozen=True)
class Job:
    """A case to run.

    Attributes:
        module: Module of the case.
        case: Name of the case.
        monitor: The factory of the monitor, `MODULE:FACTORY`.
        run_dir: Run directory that the monitor shall write; None for none.
        device: Device of the tensors of a script that names none.
    """

    module: str
    case: str
    monitor: str
    run_dir: str | None = None
    device: str = "cpu"


@dataclass
class CaseRun:
    """The result of one run.

    Attributes:
        losses: Loss of each step.
        findings: What the monitor reports.
        error: Traceback of an exception; None if the script ran to its end.
        error_in: What raised: `attach`, `step`, `findings`, `script`, `timeout` or `process`.
        stops_training: Whether raising is the way in which the monitor reports.
        wall_s: Seconds for script and findings, without the start of the interpreter.
    """

    losses: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None
    error_in: str | None = None
    stops_training: bool = False
    wall_s: float | None = None


class RecordingMonitor:
    """Record the losses and pass everything to the monitor under test."""

    def __init__(self, monitor: Monitor, result: CaseRun) -> None:
        self._monitor, self._result = monitor, result

    def step(self, loss: Any, **context: Any) -> None:
        """Record the loss and pass the step on."""
        self._result.losses.append(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))
        try:
            self._monitor.step(loss, **context)
        except Exception:  # any error of the monitor is a result, and is raised again
            self._result.error_in = "step"
            raise

    def findings(self) -> Sequence[Finding]:
        """Return the findings of the monitor under test."""
        return self._monitor.findings()


def run_here(job: Job) -> CaseRun:
    """Run a case in this process."""
    torch.set_num_threads(1)
    random.seed(0)
    with on_device(job.device):  # a module may make tensors, too
        importlib.import_module(job.module)
    case = next(c for c in protocol.REGISTRY if (c.module, c.name) == (job.module, job.case))
    factory = find_factory(job.monitor)
    result, monitors = CaseRun(), list[Monitor]()

    def attach(model: Any, optimizer: Any, **options: Any) -> RecordingMonitor:
        if job.run_dir is not None:
            options["run"] = job.run_dir
        try:
            monitors.append(factory(model, optimizer, **options))
        except Exception:  # as in `step`
            result.error_in = "attach"
            raise
        return RecordingMonitor(monitors[-1], result)

    start = time.perf_counter()
    try:
        with on_device(job.device):
            case.run(attach)
    except Exception:  # whatever a script or a monitor raises ends the case, not the evaluation
        result.error_in = result.error_in or "script"
        result.error = traceback.format_exc(limit=-4)
    for monitor in monitors:
        result.stops_training |= bool(getattr(monitor, "raises", False))
        try:
            result.findings += monitor.findings()
            if close := getattr(monitor, "close", None):
                close()
        except Exception:  # a monitor that fails at its end is scored as crashed
            result.error_in = result.error_in or "findings"
            result.error = result.error or traceback.format_exc(limit=-4)
    result.wall_s = time.perf_counter() - start
    for finding in result.findings:
        assert finding.kind in protocol.FAULTS, finding
        assert finding.severity in protocol.SEVERITIES, finding
    return result


def run_apart(job: Job, *, timeout_s: float) -> CaseRun:
    """Run a case in a new interpreter with one thread. A run that does not end in time has the error `timeout`."""
    # the hash seed fixes the order of sets, so that two runs of a script train in the same way
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | fixed
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="fault-zoo-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)))
        process = subprocess.Popen(
            [*INTERPRETER, "-m", "scripts.fault_zoo.worker", str(job_file), str(result_file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            _, noise = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers of a DataLoader
            process.communicate()
            return CaseRun(error=f"ran longer than {timeout_s:g} s", error_in="timeout")
        if process.returncode != 0 or not result_file.exists():
            text = noise.decode(errors="replace")[-MAX_NOISE_CHARS:]
            return CaseRun(error=f"exit code {process.returncode}: {text}", error_in="process")
        values = json.loads(result_file.read_text())
    return CaseRun(**values | {"findings": [Finding(**finding) for finding in values["findings"]]})


def main(job_file: str, result_file: str) -> None:
    """Run the job in the first file and write its result to the second."""
    result = run_here(Job(**json.loads(Path(job_file).read_text())))
    Path(result_file).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
