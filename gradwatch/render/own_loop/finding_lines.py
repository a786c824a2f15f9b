"""Print findings in the user's own loop: a plain line for each on standard error, and a summary at the end."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import final

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common.summary_lines import summary_lines

MAX_LINES_PER_KIND = 3
"""Maximum number of findings of a kind to print. The summary and `gradwatch diagnose` count all of them."""


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
            _print(f"more findings of {finding.kind} are not printed")

    def withdraw(self, finding: Finding) -> None:
        """Print a finding that no longer holds, if its report was printed."""
        if 0 < self._num_lines[finding.kind] <= MAX_LINES_PER_KIND:
            _print(f"withdrawn: {finding.life}")

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Print the summary of the run."""
        for line in summary_lines(history, diagnoses, run_dir=self._run_dir):
            _print(line)


def _print(text: str) -> None:
    # standard error, so that the output of the user's script stays clean
    print(f"gradwatch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal is the output
