"""Choose the sink that reacts to findings: it prints them, keeps one to raise, or calls a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, final

from gradwatch.errors import FindingError, GradwatchError, did_you_mean
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render import Sink
from gradwatch.render.own_loop.finding_lines import FindingLines

OnFinding = Literal["print", "raise"] | Callable[[Finding], object] | None
"""What `watch` does with a finding."""


@final
class FindingHandler:
    """A sink that calls a function for each finding, on the worker thread.

    Args:
        handle: Called with each finding. If it raises, it is disabled with a warning.
    """

    every = 0

    def __init__(self, handle: Callable[[Finding], object]) -> None:
        self._handle = handle

    def write(self, history: History) -> None:
        """Do nothing: steps are not handled."""

    def report(self, finding: Finding) -> None:
        """Pass a finding on."""
        self._handle(finding)

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Do nothing: every finding has been passed on."""


@final
class FindingStop:
    """Keeps the first finding that is not only information, until the training thread raises it.

    Attributes:
        finding: The finding, or None.
    """

    def __init__(self) -> None:
        self.finding: Finding | None = None

    def keep(self, finding: Finding) -> None:
        """Keep a finding, if it is the first."""
        if self.finding is None and finding.severity is not Severity.INFO:
            self.finding = finding

    def raise_finding(self) -> None:
        """Raise the kept finding, once.

        Raises:
            FindingError: A finding was kept.
        """
        finding, self.finding = self.finding, None
        if finding:
            raise FindingError(finding)


def check_on_finding(on_finding: object) -> None:
    """Check the value of the argument.

    Raises:
        GradwatchError: It is none of the known values.
    """
    if not (on_finding in ("print", "raise", None) or callable(on_finding)):
        near = did_you_mean(on_finding, ("print", "raise")) if isinstance(on_finding, str) else ""
        raise GradwatchError(f"on_finding: got {on_finding!r}, expected 'print', 'raise', a function or None{near}")


def make_sink(on_finding: OnFinding, run_dir: Path | None) -> tuple[Sink | None, FindingStop | None]:
    """Return the sink that reacts to findings, and the stop that `Monitor.step` asks."""
    if on_finding is None:
        return None, None
    if on_finding == "print":
        return FindingLines(run_dir), None
    if on_finding == "raise":
        stop = FindingStop()
        return FindingHandler(stop.keep), stop
    return FindingHandler(on_finding), None
