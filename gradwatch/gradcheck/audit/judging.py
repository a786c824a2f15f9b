"""Judge all stages of recorded steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from gradwatch.gradcheck.audit.case import AuditedStep, Outcome
from gradwatch.gradcheck.audit.gradient_stages import judge_gradient, judge_loss, judge_sum
from gradwatch.gradcheck.audit.parameters import judge_order, judge_parameters
from gradwatch.gradcheck.audit.result import STAGES, Deviation, Stage, StageName, StepAudit
from gradwatch.gradcheck.audit.update_stages import (
    judge_clip,
    judge_schedule,
    judge_unscale,
    judge_update,
    judge_write_back,
)


def judged(cases: Sequence[AuditedStep], allow: Collection[str]) -> StepAudit:
    """Return the verdict on each stage.

    Args:
        cases: The recorded step, once for each optimizer that is judged.
        allow: Kinds of differences that are on purpose.
    """
    outcomes = [outcome for case in cases for outcome in _outcomes(case)]
    stages, differences = [], []
    for name in STAGES:
        stage, found = _stage(name, [o for at, o in outcomes if at == name], allow)
        stages.append(stage)
        differences += found
    case = cases[0]
    passes = len(case.windows[-1].passes) if case.windows else sum(e.kind == "backward" for e in case.events)
    return StepAudit(stages=tuple(stages), differences=tuple(differences), passes=passes, updates=len(case.windows))


def _outcomes(case: AuditedStep) -> Iterator[tuple[StageName, Outcome]]:
    """Yield the outcomes of all judges with their stages."""
    order = judge_order(case)
    if order is not None:
        yield "update", order
    parameters = judge_parameters(case)
    if parameters is not None:
        yield "update", parameters
    trailing = case.events[case.events.index(case.windows[-1].update) + 1 :] if case.windows else []
    for window in case.windows:
        yield "loss", judge_loss(case, window)
        yield "gradient", judge_gradient(case, window)
        yield "accumulate", judge_sum(case, window)
        yield "unscale", judge_unscale(case, window)
        yield "clip", judge_clip(case, window, trailing if window is case.windows[-1] else [])
        yield "update", judge_update(case, window)
        yield "write-back", judge_write_back(case, window)
    yield "schedule", judge_schedule(case)


def _stage(name: StageName, outcomes: Iterable[Outcome], allow: Collection[str]) -> tuple[Stage, list[Deviation]]:
    """Return the verdict on a stage from the outcomes of its judges, and its differences."""
    outcomes = list(outcomes)
    found = {o.kind: replace(o, stage=name) for o in outcomes if isinstance(o, Deviation) and o.kind not in allow}
    if found:
        first = next(iter(found.values()))
        return Stage(name=name, verdict="differs", text=first.text, difference=first), list(found.values())
    if any(o == "" or isinstance(o, Deviation) for o in outcomes):
        return Stage(name=name, verdict="as meant"), []
    reasons = [o for o in outcomes if isinstance(o, str)]
    return Stage(name=name, verdict="not seen", text=reasons[0] if reasons else "the step makes no update"), []
