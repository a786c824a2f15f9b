"""Make the findings of a detector at the newest step of a history."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity, Severity


class Numbered(Protocol):
    """What has the number and the name of a kind of finding."""

    code: ClassVar[str]
    kind: ClassVar[str]


class Sign(NamedTuple):
    """What one idea of a detector has seen: a sentence, named numbers with units, and at which step it began."""

    message: str
    evidence: tuple[Quantity, ...]
    since: int | None = None


def finding_of(
    detector: Numbered,
    history: History,
    message: str,
    *evidence: Quantity,
    layer: str | None = None,
    severity: Severity = Severity.WARNING,
) -> Finding:
    """Return what a detector has found.

    Args:
        detector: Whose code and kind it has.
        history: At whose newest step it was found.
        message: One sentence.
        evidence: Named numbers with units.
        layer: Module or parameter name, or None for the whole run.
        severity: Harm to the training.
    """
    return Finding(
        code=detector.code,
        kind=detector.kind,
        layer=layer,
        step=history.step,
        severity=severity,
        message=message,
        evidence=evidence,
    )
