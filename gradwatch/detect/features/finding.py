"""Build the findings of a detector at the newest step of a history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple, Protocol

from gradwatch.detect.features.consequences import severity_after
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity, Severity


class HasCode(Protocol):
    """An object with the code and the name of a kind of finding, such as a detector."""

    code: ClassVar[str]
    kind: ClassVar[str]


class Sign(NamedTuple):
    """Observation of one mechanism of a detector.

    Attributes:
        message: One sentence.
        evidence: Named numbers with units.
        since: Step at which the symptom began, or None if the mechanism cannot tell.
        layer: Module or parameter name, or None for the whole run.
        severity: Harm to the training, or None for the severity that earlier findings leave.
    """

    message: str
    evidence: tuple[Quantity, ...]
    since: int | None = None
    layer: str | None = None
    severity: Severity | None = None


def findings_of(detector: HasCode, history: History, signs: Iterable[Sign | None]) -> Iterator[Finding]:
    """Yield the finding of each sign before computing the next sign."""
    for sign in signs:
        if sign:
            severity = severity_after(history, detector.kind) if sign.severity is None else sign.severity
            yield finding_of(
                detector,
                history,
                sign.message,
                *sign.evidence,
                layer=sign.layer,
                severity=severity,
                onset=sign.since,
            )


def finding_of(
    detector: HasCode,
    history: History,
    message: str,
    *evidence: Quantity,
    layer: str | None = None,
    layers: tuple[str, ...] = (),
    severity: Severity = Severity.WARNING,
    onset: int | None = None,
) -> Finding:
    """Return a finding at the newest step.

    Args:
        detector: Detector that gives the finding its code and kind.
        history: History of the run.
        message: One sentence.
        evidence: Named numbers with units.
        layer: Module or parameter name, or None for the whole run.
        layers: Names of all layers that share the cause, instead of `layer`.
        severity: Harm to the training.
        onset: First step with the symptom, or None if the detector cannot tell.
    """
    return Finding(
        code=detector.code,
        kind=detector.kind,
        layer=layers[0] if layers else layer,
        step=history.step,
        severity=severity,
        message=message,
        evidence=evidence,
        onset=onset,
        layers=layers if len(layers) > 1 else (),
    )


def subject(names: tuple[str, ...]) -> str:
    """Return the subject of a message about some layers, with a singular verb after it; no names: the whole model."""
    return f"each of {len(names)} layers" if len(names) > 1 else names[0] if names else "the whole model"


def format_factor(ratio: float) -> str:
    """Format a factor for a message with three significant digits, such as `1.2`, `528` or `2,060`."""
    # `.3g` alone would write 2,060 as 2.06e+03, and `,` alone keeps every digit
    return f"{float(f'{ratio:.3g}'):,.10g}"


def format_fold(powers: float) -> str:
    """Format a factor of 10**powers for a message, such as `2,060-fold` or `1e24-fold`."""
    return f"{format_factor(10**powers)}-fold" if powers < 6 else f"1e{powers:.0f}-fold"
