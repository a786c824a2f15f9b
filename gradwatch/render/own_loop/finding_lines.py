"""Print findings in the user's own loop: a plain line for each on standard error, and a summary at the end."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import final

from gradwatch.events import LEFT_OUT
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.run_stats import is_long_enough

MAX_LINES_PER_KIND = 3
"""Maximum number of findings of a kind to print. The summary and `gradwatch diagnose` count all of them."""
MAX_KINDS = 4
"""Maximum number of kinds to list in the summary."""


@final
class FindingLines:
    """Prints each new warning and critical finding, and a summary when the run ends.

    Args:
        run_dir: Run directory, or None if the history is only in memory.
    """

    every = 0  # no step is due: only findings are printed

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._num_lines: Counter[str] = Counter()

    def write(self, history: History) -> None:
        """Do nothing: steps are not printed."""

    def report(self, finding: Finding) -> None:
        """Print a finding, unless `MAX_LINES_PER_KIND` of its kind are printed already."""
        if finding.severity is Severity.INFO:
            return
        self._num_lines[finding.kind] += 1
        if self._num_lines[finding.kind] <= MAX_LINES_PER_KIND:
            _print(str(finding))
        elif self._num_lines[finding.kind] == MAX_LINES_PER_KIND + 1:
            _print(f"more layers have {finding.kind}; they are in the summary of the run")

    def withdraw(self, finding: Finding) -> None:
        """Print a finding that no longer holds, if its report was printed."""
        if 0 < self._num_lines[finding.kind] <= MAX_LINES_PER_KIND:
            _print(f"withdrawn: {finding.life}")

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Print the problems, the most likely cause with its fix, and the command that shows more."""
        if history.step < 0:  # the loop probably never calls `monitor.step`
            _print("no step was recorded. Call `monitor.step(loss)` after each `optimizer.step()`")
            return
        problems, over = ([f for f in of if f.severity > Severity.INFO] for of in (history.findings, history.withdrawn))
        _print(_headline(history, problems))
        if over:
            more = f" and {len(over) - 1:,} more" if len(over) > 1 else ""
            _print(f"withdrawn: {over[0].life}{more}")
        if problems and diagnoses:
            first = diagnoses[0]
            _print(f"most likely cause: {first.cause} ({first.sureness}){_fix(first)}")
        if left_out := [event.text for event in history.events if event.kind == LEFT_OUT.name]:
            _print(f"not looked at: {', '.join(left_out)}")
        if self._run_dir:
            _print(f"details: gradwatch diagnose {self._run_dir}")


def _fix(diagnosis: Diagnosis) -> str:
    if not diagnosis.remedies:
        return ""
    best = diagnosis.remedies[0]
    # several lines of code do not fit here; `gradwatch diagnose` shows them
    code = f": {best.code}" if best.code and "\n" not in best.code else ""
    return f"; fix: {best.text}{code}"


def _headline(history: History, problems: list[Finding]) -> str:
    steps = units.plural(history.step + 1, "step")
    if not problems:
        health = "healthy: no problems found" if is_long_enough(history) else "no problems found"
        return f"{health} in {steps}"
    # each kind once, at the onset of its first finding
    first_steps: dict[str, int] = {}
    for finding in problems:
        first_steps.setdefault(finding.kind, finding.since)
    named = [f"{kind} (step {step:,})" for kind, step in first_steps.items()]
    more = f" and {len(named) - MAX_KINDS} more kinds" if len(named) > MAX_KINDS else ""
    plural = "" if len(problems) == 1 else "s"
    return f"{len(problems):,} problem{plural} in {steps}: {', '.join(named[:MAX_KINDS])}{more}"


def _print(text: str) -> None:
    # standard error, so that the output of the user's script stays clean
    print(f"gradwatch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal is the output
