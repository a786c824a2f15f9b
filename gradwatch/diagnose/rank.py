"""Turn findings into diagnoses: explain many findings with few causes, root causes before their consequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

from gradwatch.diagnose.case import Case
from gradwatch.diagnose.causes import CAUSES, Cause
from gradwatch.diagnose.condition import Condition, Fact
from gradwatch.diagnose.conditions import conditions_of
from gradwatch.diagnose.confirmation import confirmation
from gradwatch.diagnose.graph_notes import graph_notes
from gradwatch.diagnose.remedies import remedies
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity

SLACK_STEPS = 20
"""Steps by which a symptom may be found before its cause: some detectors need more steps to be sure than others."""

MAX_CERTAINTY = 0.95
"""Largest certainty: a table cannot list every possible cause."""

WEIGHT = {Severity.INFO: 1, Severity.WARNING: 2, Severity.CRITICAL: 4}
"""Value of explaining one kind of finding, by its highest severity."""


def diagnose(history: History) -> tuple[Diagnosis, ...]:
    """Explain every finding of a history by exactly one cause.

    Causes are picked one by one. Each pick is the cause that explains most of the remaining findings. A kind of
    finding counts once, by its severity, times the certainty of the cause. A cause does not explain findings that came
    clearly before its leading finding. The certainty is

        odds / (odds + odds of the causes that compete for the same leading finding + 1)

    The odds of a cause are a product from the table: the odds of the leading kind, of the conditions that hold, and of
    the further kinds that the cause explains. The 1 stands for causes outside the table. The certainty is at most 0.95.
    The odds are judged on a coarse scale and not measured, so the certainty only ranks causes against each other. Near
    0.9 one cause explains everything and has no rival. Near 0.5 another cause is as likely, and the text names it.
    Below 0.5 the conditions say too little. The certainty is not the frequency with which the cause is right.

    Args:
        history: History of the run with its findings.

    Returns:
        Diagnoses, the most severe first, and among equals the earliest first.
    """
    conditions = cache(partial(conditions_of, history))
    left = sorted(history.findings, key=lambda f: (f.step, -f.severity))
    made: list[Diagnosis] = []
    while left:
        best = _best(left, conditions)
        # without a cause, all findings of a kind share one diagnosis, so that the loop ends
        explained = best.findings if best else tuple(f for f in left if f.kind == left[0].kind)
        made.append(_diagnosis(history, best) if best else _unexplained(explained))
        left = [f for f in left if f not in explained]
    return tuple(sorted(made, key=lambda d: (-d.severity, d.findings[0].step)))


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    """A cause, the findings that it would explain (the leading one first), its odds and its certainty."""

    cause: Cause
    findings: tuple[Finding, ...]
    odds: float
    certainty: float = 0.0
    rivals: tuple[str, ...] = ()

    @property
    def worth(self) -> float:
        """The certainty times the weight of the explained findings."""
        gravest: dict[str, int] = {}
        for finding in self.findings:
            # a kind counts once, so that a fault in many layers does not outweigh other kinds
            gravest[finding.kind] = max(gravest.get(finding.kind, 0), WEIGHT[finding.severity])
        return self.certainty * sum(gravest.values())


def _best(left: Sequence[Finding], conditions: Callable[[Finding], frozenset[Fact]]) -> _Candidate | None:
    """Return the cause that explains most of the remaining findings, or None if no cause fits."""
    candidates = []
    for leading in _leading(left):
        holds = conditions(leading)
        rivals = [c for cause in CAUSES if (c := _candidate(cause, leading, left, holds)) is not None]
        everything = 1 + sum(c.odds for c in rivals)  # 1 for causes outside the table
        for c in rivals:
            # a rival within a factor of 3 is worth naming: odds are coarse
            near = tuple(r.cause.name for r in rivals if r is not c and r.odds >= c.odds / 3)
            candidates.append(_Candidate(c.cause, c.findings, c.odds, min(MAX_CERTAINTY, c.odds / everything), near))
    return max(candidates, key=lambda c: (c.worth, -c.findings[0].step), default=None)


def _leading(left: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each kind: later findings of the same kind have the same cause."""
    return list({f.kind: f for f in reversed(left)}.values())  # reversed: the first one wins


def _candidate(cause: Cause, leading: Finding, left: Sequence[Finding], holds: frozenset[Fact]) -> _Candidate | None:
    """Return the findings that a cause explains if `leading` leads to it, or None if the cause is ruled out."""
    if leading.kind not in cause.leads or not cause.requires <= holds or cause.excludes & holds:
        return None
    odds = cause.leads[leading.kind]
    for condition, factor in cause.conditions.items():
        odds *= factor if condition in holds else 1
    explained = [f for f in left if f.kind == leading.kind]
    for kind in dict.fromkeys(f.kind for f in left if f.kind != leading.kind):
        # stronger evidence of the cause must not come long after `leading`: the cause was not there yet
        end = leading.step + SLACK_STEPS if cause.leads.get(kind, 0) > cause.leads[leading.kind] else math.inf
        later = [f for f in left if f.kind == kind and leading.step - SLACK_STEPS <= f.step <= end]
        if later and (kind in cause.explains or kind in cause.leads):
            # max: a further symptom never makes a cause less likely
            odds *= max(1.0, cause.explains.get(kind, cause.leads.get(kind, 1.0)))
            explained += later
    explained += [f for f in left if f.kind in cause.announced_by and f.step <= leading.step]
    explained.sort(key=lambda f: (f is not leading, f.kind != leading.kind, f.step, -f.severity))
    return _Candidate(cause, tuple(explained), odds)


def _diagnosis(history: History, best: _Candidate) -> Diagnosis:
    leading = best.findings[0]
    case = Case.of(history, best.findings)
    others = {f.kind: f.since for f in reversed(best.findings) if f.kind != leading.kind}
    # without the messages of the findings, which are shown with every diagnosis
    parts = [best.cause.because]
    parts += [f"In the autograd graph of the loss: {text}." for text in graph_notes(history, leading)]
    if case.numbers.jumped_at is not None and best.cause.conditions.get(Condition.RATE_JUMPED, 0) > 1:
        parts.append(f"The learning rate jumped to a new maximum at step {case.numbers.jumped_at}.")
    # a symptom may be found later than another one that it follows, so the onsets decide
    later = {kind: step for kind, step in others.items() if step >= leading.since}
    earlier = {kind: step for kind, step in others.items() if step < leading.since}
    for words, symptoms in (("Later symptoms", later), ("Earlier symptoms", earlier)):
        chain = ", ".join(f"{kind} at step {step}" for kind, step in sorted(symptoms.items(), key=lambda k: k[1]))
        parts += [f"{words}: {chain}."] if chain else []
    advice = remedies(best.cause.remedies, case)
    confirm, confirm_code = confirmation(best.cause, case, history, remedies=advice)
    if best.rivals:
        confirm += f" If not, the next most likely cause is {' or '.join(best.rivals)}."
    return Diagnosis(
        cause=best.cause.name,
        cause_id=best.cause.id,
        certainty=best.certainty,
        findings=best.findings,
        because=" ".join(parts),
        confirm=confirm,
        confirm_code=confirm_code,
        remedies=advice,
        source=best.cause.source,
    )


def _unexplained(findings: tuple[Finding, ...]) -> Diagnosis:
    """Return a diagnosis for findings that lead to no cause in the table."""
    first = findings[0]
    return Diagnosis(
        cause=f"{first.kind}, unexplained",
        certainty=0.0,
        findings=findings,
        because="No known cause matches this finding.",
        confirm=f"`gradwatch explain {first.code}` describes the symptom and what to check. Compare the "
        f"steps before {first.since} with the steps after it, layer by layer.",
        remedies=(),
        source="",
    )
