"""Write the command or code that confirms a cause in a run, with the real paths of the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gradwatch.diagnose.case import Case
from gradwatch.diagnose.causes import Cause
from gradwatch.events import INCIDENT
from gradwatch.history.disk.ranks import part_of, saved_steps
from gradwatch.history.store import History
from gradwatch.records import Finding, Remedy, RunInfo, Severity

OWN_STEP = "There, `step` is a function of the batch that returns the loss, without the optimizer."
NOT_KEPT = "This run did not save the step: record the steps as below, run the loop again, and diagnose it again."

NOT_KEPT_BY_RANKS = "To save it, pass record=True to gradwatch.watch on all ranks."
RANK_KIND = "rank-non-finite"


def confirmation(cause: Cause, case: Case, history: History, *, remedies: Sequence[Remedy]) -> tuple[str, str]:
    """Return how to confirm a cause: sentences, and a command or Python code, which may be empty.

    Args:
        cause: The cause.
        case: Its findings and the run.
        history: History of the run; without a directory there is nothing to run again.
        remedies: Remedies of the cause.
    """
    text, run = cause.confirm, history.directory
    if not case.is_own_loop:
        return text, _config_command(cause, case, history, remedies) if run else ""
    if (rank := _bad_rank(case)) is not None:
        return _of_rank(cause, case, run, rank)
    if not cause.is_confirmed_by_rerun:
        return text, ""
    if run and (step := _incident_step(history, case.findings)) is not None:
        return f"{text} {OWN_STEP}", rerun_code(history, step)
    where = f"runs/{case.info.name}" if run is None else str(run)
    models = _models(case.info)
    return f"{text} {NOT_KEPT}", f'monitor = gradwatch.watch({models}, optimizer, run="{where}", record=True)'


def _bad_rank(case: Case) -> int | None:
    """Return the rank that the case traces a NaN or Inf to, or None."""
    evidence = (q for finding in case.findings if finding.kind == RANK_KIND for q in finding.evidence)
    return next((int(q.value) for q in evidence if q.key == "rank"), None)


def _of_rank(cause: Cause, case: Case, run: Path | None, rank: int) -> tuple[str, str]:
    """Return how to run the saved step of a rank again, or how to save it."""
    saved = saved_steps(part_of(run, rank)) if run else []
    for finding in case.findings:
        if run and finding.kind == RANK_KIND and finding.since in saved:
            code = _call(part_of(run, rank), saved.index(finding.since), case.info)
            return f"{cause.confirm} {OWN_STEP}", code
    return f"{cause.confirm} {NOT_KEPT_BY_RANKS}" if cause.is_confirmed_by_rerun else cause.confirm, ""


def rerun_code(history: History, step: int) -> str:
    """Return the code that names the first bad operation of a saved step of the user's own loop.

    It is a command for a shell if the user's script is known, and else Python for the script.

    Args:
        history: History with a directory.
        step: Step of an incident.
    """
    steps = sorted(event.step for event in history.events if event.kind == INCIDENT.name)
    return _call(history.directory, steps.index(step), history.info)


def _call(run: Path | None, index: int, info: RunInfo) -> str:
    saved = f'gradwatch.incidents("{run}")[{index}]'
    script = Path(info.script)
    if not script.stem.isidentifier():
        return f"print({saved}.locate(step, model={_models(info)}))"
    owner = f"{script.stem}."
    call = f"{saved}.locate({owner}step, model={_models(info, owner)})"
    program = f"import gradwatch, {script.stem}; print({call})"
    folder = f"PYTHONPATH={shlex.quote(str(script.parent))} " if script.parent != Path() else ""
    return f"{folder}python -c {shlex.quote(program)}"


def _config_command(cause: Cause, case: Case, history: History, remedies: Sequence[Remedy]) -> str:
    run = shlex.quote(str(history.directory))
    if (rank := _bad_rank(case)) is not None:
        since = next(finding.since for finding in case.findings if finding.kind == RANK_KIND)
        return f"gradwatch replay {run} --rank {rank} --step {since}"
    if cause.is_confirmed_by_rerun:
        step = _incident_step(history, case.findings)
        return f"gradwatch replay {run} --step {case.findings[0].since if step is None else step}"
    # only changes of the config are tested, and findings of information are not
    is_testable = any(r.patch for r in remedies) and case.findings[0].severity > Severity.INFO
    return f"gradwatch diagnose {run} --verify" if is_testable else ""


def _incident_step(history: History, findings: Sequence[Finding]) -> int | None:
    """Return the first saved step with one of the findings, or None."""
    steps = sorted(event.step for event in history.events if event.kind == INCIDENT.name)
    return next((step for step in steps if any(f.since <= step <= f.step for f in findings)), None)


def _models(info: RunInfo, owner: str = "") -> str:
    """Return Python for the first argument of `watch`."""
    if info.models == ("",):
        return f"{owner}model"
    return "{" + ", ".join(f'"{name}": {owner}{name}' for name in info.models) + "}"
