"""Choose the sink that reacts to findings: print each, keep one to raise, or call a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, final

from gradwatch.errors import FindingError
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render import Sink
from gradwatch.render.own_loop.finding_lines import FindingLines

OnFinding = Literal["print", "raise"] | Callable[[Finding], object] | None
"""Reaction of `watch` to a finding."""


@final
class FindingHandler:
    """A sink that calls a function for each finding, on the worker thread.

    Args:
        handle: Function to call with each finding. If it raises, it is disabled with a warning.
    """

    every = 0  # no step is due, so the worker thread does not stop for this sink

    def __init__(self, handle: Callable[[Finding], object]) -> None:
        self._handle = handle

    def write(self, history: History) -> None:
        """Do nothing: only findings are handled."""

    def report(self, finding: Finding) -> None:
        """Call the function with a finding."""
        self._handle(finding)

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Do nothing: the function has received every finding."""


@final
class FindingStop:
    """Keeps the first finding above info until the training thread raises it.

    Findings arrive on the worker thread, where an error would not stop the training loop.

    Attributes:
        finding: The finding, or None.
    """

    def __init__(self) -> None:
        self.finding: Finding | None = None

    def keep(self, finding: Finding) -> None:
        """Keep a finding if it is the first above info."""
        if self.finding is None and finding.severity is not Severity.INFO:
            self.finding = finding

    def raise_finding(self) -> None:
        """Raise the kept finding, once.

        Raises:
            FindingError: A finding was kept.
        """
        # cleared first: a loop that catches the error must not get it again at the next step
        finding, self.finding = self.finding, None
        if finding:
            raise FindingError(finding)


def make_sink(on_finding: OnFinding, run_dir: Path | None) -> tuple[Sink | None, FindingStop | None]:
    """Return the sink that reacts to findings, and for "raise" the stop that `Monitor.step` checks."""
    if on_finding is None:
        return None, None
    if on_finding == "print":
        return FindingLines(run_dir), None
    if on_finding == "raise":
        stop = FindingStop()
        # the worker thread keeps the finding, and the training thread raises it
        return FindingHandler(stop.keep), stop
    return FindingHandler(on_finding), None
