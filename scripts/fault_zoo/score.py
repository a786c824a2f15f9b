"""Run cases under monitors and count how well each monitor does."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.fault_zoo.judge import Judgement, are_losses_equal, judge
from scripts.fault_zoo.monitors import NO_MONITOR
from scripts.fault_zoo.protocol import Case, Finding
from scripts.fault_zoo.worker import CaseRun, Job, run_apart


@dataclass(frozen=True)
class Row:
    """One case under one monitor.

    Attributes:
        set: Set of the case.
        monitor: Name of the monitor.
        case: Name of the case.
        fault: The planted fault; None for a healthy script.
        status: `ok`; `stopped` if the monitor raised to report; `crash` if it raised for another reason; `timeout`.
        error: Traceback of what raised, also if the script raises by itself.
        steps: Number of steps.
        is_perturbed: The losses differ from the losses without a monitor: it changed the training.
        judgement: What the findings are worth.
        findings: The findings.
    """

    set: str
    monitor: str
    case: str
    fault: str | None
    status: str
    error: str | None
    steps: int
    is_perturbed: bool
    judgement: Judgement
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Totals:
    """The counts of one set under one monitor: a line of the table."""

    set: str
    monitor: str
    faulty: int
    found: int
    right_first: int
    layer_named: int
    layer_named_of: int
    median_steps_to_detection: float | None
    healthy: int
    alarms: int
    runs: int
    perturbed: int
    crashed: int
    timed_out: int


def score_cases(
    cases: Mapping[str, Sequence[Case]],
    monitors: Mapping[str, str],
    *,
    jobs: int,
    timeout_s: float,
    keep: Path | None,
    report: Callable[[Row], None],
    device: str = "cpu",
) -> list[Row]:
    """Run each case without a monitor and under each monitor, each time in a new interpreter.

    Args:
        cases: The cases of each set.
        monitors: Factory of each monitor, `MODULE:FACTORY`.
        jobs: Runs at a time.
        timeout_s: Limit for one run.
        keep: Folder for the run directories, one per case: `KEEP/SET/CASE`.
        report: Receives each row as soon as its run has ended.
        device: Device of tensors for which a script names none.
    """

    def score_case(set_name: str, case: Case) -> list[Row]:
        plain = run_apart(Job(case.module, case.name, NO_MONITOR, device=device), timeout_s=timeout_s)
        rows = []
        for name, factory in monitors.items():
            run_dir = str(keep.resolve() / set_name / case.name) if keep else None
            watched = run_apart(Job(case.module, case.name, factory, run_dir, device), timeout_s=timeout_s)
            rows.append(_row(set_name, name, case, plain, watched))
            report(rows[-1])
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(score_case, name, case) for name, several in cases.items() for case in several]
        return [row for future in futures for row in future.result()]


def _row(set_name: str, monitor: str, case: Case, plain: CaseRun, watched: CaseRun) -> Row:
    status = "ok"
    # some faults end a script by themselves: an exception of the script is no crash of the monitor
    is_own_error = watched.error_in == "script" == plain.error_in
    if watched.error_in == "timeout":
        status = "timeout"
    elif watched.error is not None and not is_own_error:
        has_reported = any(finding.severity != "info" for finding in watched.findings)
        status = "stopped" if watched.stops_training and has_reported else "crash"
    is_complete = plain.error is None and watched.error is None
    return Row(
        set=set_name,
        monitor=monitor,
        case=case.name,
        fault=case.fault,
        status=status,
        error=watched.error,
        steps=len(watched.losses),
        is_perturbed=is_complete and not are_losses_equal(plain.losses, watched.losses),
        judgement=judge(case, watched.findings),
        findings=watched.findings,
    )


def count(rows: Iterable[Row]) -> Totals:
    """Count the rows of one set under one monitor."""
    rows = list(rows)
    faulty, healthy = [r for r in rows if r.fault], [r for r in rows if not r.fault]
    found = [r for r in faulty if r.judgement.is_found]
    located = [r for r in found if r.judgement.is_layer_named is not None]
    steps = [r.judgement.steps_to_detection for r in found if r.judgement.steps_to_detection is not None]
    return Totals(
        set=rows[0].set,
        monitor=rows[0].monitor,
        faulty=len(faulty),
        found=len(found),
        right_first=sum(r.judgement.is_right_first for r in faulty),
        layer_named=sum(bool(r.judgement.is_layer_named) for r in located),
        layer_named_of=len(located),
        median_steps_to_detection=statistics.median(steps) if steps else None,
        healthy=len(healthy),
        alarms=sum(bool(r.judgement.wrong_kinds) for r in healthy),
        runs=len(rows),
        perturbed=sum(r.is_perturbed for r in rows),
        crashed=sum(r.status == "crash" for r in rows),
        timed_out=sum(r.status == "timeout" for r in rows),
    )
