"""Group the findings of a run into problems: one per cause, with its symptoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity

NO_CAUSE = "no known cause"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunProblem:
    """One cause and its symptoms.

    Args:
        cause: Description of the cause.
        findings: Findings that the cause explains, the leading one first.
        diagnosis: The diagnosis, or None for findings without one.
    """

    cause: str
    findings: tuple[Finding, ...]
    diagnosis: Diagnosis | None = None

    @property
    def severity(self) -> Severity:
        """The highest severity of the findings."""
        return max(f.severity for f in self.findings)

    @property
    def sureness(self) -> str:
        """The certainty in words; empty if no cause is known."""
        return self.diagnosis.sureness if self.diagnosis and self.diagnosis.certainty > 0 else ""

    @property
    def symptoms(self) -> tuple[tuple[Finding, ...], ...]:
        """The findings of each kind, the leading kind first and the others by onset."""
        by_kind = grouped(self.findings)
        return (by_kind[0], *sorted(by_kind[1:], key=lambda mine: min(f.since for f in mine)))

    @property
    def remedy(self) -> Remedy | None:
        """The most effective remedy that was not refuted by a test, or None."""
        known = self.diagnosis.remedies if self.diagnosis else ()
        return next((remedy for remedy in known if remedy.cures is not False), None)


def problems(history: History, diagnoses: Sequence[Diagnosis]) -> list[RunProblem]:
    """Return the problems of a run, the most severe first.

    The last one holds the findings that no diagnosis explains. A problem of severity info is only a note.
    """
    found = [RunProblem(cause=d.cause, findings=d.findings, diagnosis=d) for d in diagnoses]
    explained = {f for d in diagnoses for f in d.findings}  # findings are frozen, so they can be in a set
    if unexplained := sorted((f for f in history.findings if f not in explained), key=lambda f: -f.severity):
        found.append(RunProblem(cause=NO_CAUSE, findings=tuple(unexplained)))
    # a stable sort: among problems of equal severity, the earliest stays first
    return sorted(found, key=lambda problem: -problem.severity)


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, ...]]:
    """Return the findings of each kind, in the order of their first appearance."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    return [tuple(mine) for mine in by_kind.values()]


def names_of(findings: Iterable[Finding]) -> list[str]:
    """Return the names of the affected layers, each once; empty if only the whole run is affected."""
    return list(dict.fromkeys(name for finding in findings for name in finding.names))
