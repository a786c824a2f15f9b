"""Summarize a run in a few plain lines: its problems, the most likely cause with its fix, and where to read more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwatch.events import LEFT_OUT, PARAMETERS_JOINED
from gradwatch.history.disk.ranks import ranks_text
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.run_stats import HEALTHY, is_judged, too_short_for

MAX_KINDS = 4
"""Maximum number of kinds to list."""

NOT_CHECKED = frozenset({LEFT_OUT.name, PARAMETERS_JOINED.name})
"""Kinds of events that say what the monitor does not read, or no longer."""


def summary_text(history: History, diagnoses: Sequence[Diagnosis], *, run_dir: Path | None) -> str:
    """Return the lines of `summary_lines` as the text of a monitor or a run, with its name."""
    first, *others = summary_lines(history, diagnoses, run_dir=run_dir)
    if history.findings and not run_dir:  # only a monitor has no directory
        others.append("details: print(monitor.findings())")
    return "\n".join([f"{history.info.name}: {first}", *others])


def summary_lines(history: History, diagnoses: Sequence[Diagnosis], *, run_dir: Path | None) -> list[str]:
    """Return the summary of a run.

    Args:
        history: The run.
        diagnoses: Diagnoses of its findings, most severe first.
        run_dir: Run directory, or None if the history is only in memory.
    """
    if history.step < 0 and not history.findings:
        # a user's own loop probably never calls `monitor.step`
        hint = ": call `monitor.step(loss)` after each `optimizer.step()`" if history.info.settings is None else ""
        return [f"no step was recorded{hint}"]
    problems, over = ([f for f in of if f.severity > Severity.INFO] for of in (history.findings, history.withdrawn))
    lines = [_headline(history, problems)]
    if ranks := ranks_text(history):
        lines.append(ranks)
    if over:
        more = f" and {len(over) - 1:,} more" if len(over) > 1 else ""
        lines.append(f"withdrawn: {over[0].life}{more}")
    if problems and diagnoses:
        lines.append(f"most likely cause: {diagnoses[0]}")
    if left_out := [event.text for event in history.events if event.kind in NOT_CHECKED]:
        lines.append(f"not checked: {'; '.join(left_out)}")
    if run_dir:
        lines.append(f"details: gradwatch diagnose {run_dir}")
    return lines


def _headline(history: History, problems: Sequence[Finding]) -> str:
    steps = units.plural(history.step + 1, "step")
    if not problems:
        short = too_short_for(history)
        text = f"no problems found in {steps}" + (f"; too short for: {', '.join(short)}" if short else "")
        return f"{HEALTHY}: {text}" if is_judged(history) else text
    # each kind once, at the onset of its first finding
    first_steps: dict[str, int] = {}
    for finding in problems:
        first_steps.setdefault(finding.kind, finding.since)
    named = [f"{kind} (step {step:,})" for kind, step in first_steps.items()]
    more = f" and {len(named) - MAX_KINDS} more kinds" if len(named) > MAX_KINDS else ""
    plural = "" if len(problems) == 1 else "s"
    return f"{len(problems):,} problem{plural} in {steps}: {', '.join(named[:MAX_KINDS])}{more}"
