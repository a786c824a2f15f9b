"""Prove a diagnosis: change one thing at a time, run again, and see whether the symptom is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from gradwatch.diagnose.causes import CAUSES, Cause, CauseId, cause_of
from gradwatch.diagnose.conditions import conditions_of
from gradwatch.diagnose.remedies import remedies
from gradwatch.diagnose.run_numbers import RunNumbers, measure_run
from gradwatch.errors import GradwatchError
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.replay.config_change import Change, config_of, is_taken, taken_back
from gradwatch.replay.locate import bad_samples
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.in_run import locate_step
from gradwatch.replay.restore.restored_step import Scene, open_scene
from gradwatch.replay.restore.warm_start import Midway
from gradwatch.replay.trials.runner import Theatre
from gradwatch.replay.trials.trial_run import NON_FINITE, Rehearsal, same_illness
from gradwatch.replay.verify.interventions import Intervention, interventions
from gradwatch.replay.verify.result import Check, Proof, Status, Tested
from gradwatch.replay.verify.symptom import KINDS, Symptom, observe

AXES = {
    "data": ("the data of this batch", "other data"),
    "state": ("the weights that training has come to", "the first weights"),
    "numerics": ("the number format", "float32"),
    "chance": ("the draw of random numbers", "other random numbers"),
}
"""What a symptom may depend on: how that is said where it does, and where it does not."""


def verify(theatre: Theatre, diagnoses: Sequence[Diagnosis]) -> tuple[Proof, ...]:
    """Prove each diagnosis of a run, or refute it; those that are for information only are left out.

    Args:
        theatre: Of the run, which is only read.
        diagnoses: What is thought of it.
    """
    return tuple(_prove(theatre, d) for d in diagnoses if d.severity > Severity.INFO)


def _prove(theatre: Theatre, diagnosis: Diagnosis) -> Proof:
    began = time.perf_counter()
    finding = diagnosis.findings[0]
    facts = measure_run(theatre.history, until=finding.step)
    midway = theatre.midway(finding)
    seen = _seen_in_step(theatre, finding, facts, midway) if finding.kind in KINDS else None
    if seen is None or not seen.comes_back:
        seen = _seen_in_training(theatre, finding, midway, located=seen.located if seen else None)
    causes = tuple(_tested(theatre, diagnosis, seen, facts))
    ids = {tested.cause_id for tested in causes}
    further = [c for c in seen.checks if not ids & set(c.causes) and c.axis != "look"]
    if seen.comes_back and not any(c.gone and c.change and c.is_healthy for t in causes for c in t.checks):
        further += _taken_back(theatre, finding, seen)
    return Proof(
        finding=finding,
        control=seen.control,
        comes_back=seen.comes_back,
        located=seen.located,
        sorted=_sorted(seen.checks),
        causes=causes,
        further=tuple(further),
        seconds=time.perf_counter() - began,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What came when nothing was changed, and then with one change each; `midway` is where further changes begin."""

    control: str
    comes_back: bool
    located: Located | None
    midway: Midway | None
    checks: tuple[Check, ...] = ()


def _seen_in_step(theatre: Theatre, finding: Finding, facts: RunNumbers, midway: Midway | None) -> _Seen | None:
    """Look at the step of a finding alone, from its recorded state; None where that is out of reach."""
    with contextlib.ExitStack() as stack:
        try:
            scene = stack.enter_context(open_scene(theatre.run, finding.step))
        except GradwatchError:
            return None
        symptom = Symptom.of(finding, scene, usual_norm=facts.usual_norm)
        control, comes_back = _control_of(scene, symptom)
        located = locate_step(scene) if finding.kind in NON_FINITE else None
        tried = interventions(scene, symptom, located) if comes_back else ()
        made = [check for i in tried for check in _intervened(i, symptom)]
        made += _data_looked_at(scene) if located else []
        return _Seen(control=control, comes_back=comes_back, located=located, midway=midway, checks=tuple(made))


def _data_looked_at(scene: Scene) -> list[Check]:
    """Return that the batch is finite, where it is: then it is no bad data."""
    if any(bad_samples.not_finite(batch) for batch in scene.window):
        return []
    told = "every value is finite"
    return [Check(text="the batch, looked at", result=told, gone=False, causes=(CauseId.BAD_DATA,), axis="look")]


def _seen_in_training(theatre: Theatre, finding: Finding, midway: Midway | None, *, located: Located | None) -> _Seen:
    """Train again, from the recorded state or else from the start, where it comes back; and from another seed."""
    control, comes_back = _trained_again(theatre, finding, midway)
    if midway and not comes_back:
        midway = None
        control, comes_back = _trained_again(theatre, finding, None)
    made = (_other_seed(theatre, finding),) if comes_back else ()
    return _Seen(control=control, comes_back=comes_back, located=located, midway=midway, checks=made)


def _control_of(scene: Scene, symptom: Symptom) -> tuple[str, bool]:
    """Run a step twice as it was; say what came of it, and whether the symptom came back."""
    first, second = observe(scene, symptom), observe(scene, symptom)
    same = repr(first) == repr(second)  # nan is equal to nan here
    told = f"step {scene.step:,} again, twice: {symptom.told(first)}"
    told += ", bit for bit the same" if same else f", then {symptom.told(second)}: not deterministic"
    return told, symptom.is_in(first) and symptom.is_in(second)


def _trained_again(theatre: Theatre, finding: Finding, midway: Midway | None) -> tuple[str, bool]:
    steps = theatre.steps_for(finding)
    again = theatre.rehearse({}, steps=steps, midway=midway)
    if again is None:
        return f"no time to train {steps:,} steps again", False
    found = again.found(finding)
    told = f"trained {_span(again)} again"
    if not found:
        return f"{told}: no {finding.kind}", False
    return f"{told}: {finding.kind} at step {found[0].step:,}, as before", True


def _span(made: Rehearsal) -> str:
    """Return which steps were trained."""
    return f"{made.steps:,} steps" + (f" from step {made.began_at:,} on" if made.began_at else "")


def _other_seed(theatre: Theatre, finding: Finding) -> Check:
    """Train with another seed: other first weights, another order of the data, other draws."""
    seed = config_of(theatre.run).run.seed + 1
    change = Change(text=f"another seed, {seed}", patch={"run.seed": seed})
    return replace(_changed(theatre, finding, change, None), change=None, axis="chance")


def _intervened(intervention: Intervention, symptom: Symptom) -> Iterator[Check]:
    """Run an intervention, all of its variants; yield nothing where it does not apply after all."""
    try:
        outcomes = intervention.run()
    except (RuntimeError, ValueError, TypeError) as error:  # a change that the model cannot take
        yield _check(intervention, gone=None, result=f"cannot be run: {str(error).splitlines()[0]}")
        return
    if not outcomes:
        return
    ill = [o for o in outcomes if symptom.is_in(o)]
    told = symptom.told((ill or outcomes)[0])
    if len(outcomes) > 1:
        told = f"ill in {len(ill)} of {len(outcomes)}; {told}"
    yield _check(intervention, gone=not ill, result=told)


def _check(intervention: Intervention, *, gone: bool | None, result: str) -> Check:
    return Check(text=intervention.text, result=result, gone=gone, causes=intervention.causes, axis=intervention.axis)


def _sorted(checks: Sequence[Check]) -> str:
    """Say what the symptom depends on: it is gone where that is changed."""
    takes = [what for axis, (what, _) in AXES.items() if any(c.axis == axis and c.gone for c in checks)]
    if takes:
        return f"it takes {' and '.join(takes)}"
    kept = [other for axis, (_, other) in AXES.items() if any(c.axis == axis and c.gone is False for c in checks)]
    return f"it comes with {' and '.join(kept)}, too" if kept else ""


def _tested(theatre: Theatre, diagnosis: Diagnosis, seen: _Seen, facts: RunNumbers) -> Iterator[Tested]:
    """Yield the diagnosed cause, and its rivals where something speaks for them, or it is not confirmed itself."""
    leading, ill = diagnosis.findings[0], seen.comes_back
    own = [c for c in seen.checks if diagnosis.cause_id in c.causes]
    own += _rehearsed(theatre, leading, diagnosis.remedies, seen)
    tested = _judged(diagnosis.cause, diagnosis.cause_id, own, comes_back=ill)
    yield tested
    rivals = _rivals(theatre.history, diagnosis)
    for cause in rivals:
        checks = [c for c in seen.checks if cause.id in c.causes]
        if tested.status == "confirmed" and not any(c.gone for c in checks):
            continue
        if not checks:
            made = remedies(cause.remedies, findings=diagnosis.findings, numbers=facts)
            checks += _rehearsed(theatre, leading, made, seen)
        if checks:
            yield _judged(cause.name, cause.id, checks, comes_back=ill)
    known = {diagnosis.cause_id, *(cause.id for cause in rivals)}
    for other in dict.fromkeys(i for c in seen.checks if c.gone for i in c.causes if i not in known):
        yield _judged(cause_of(other).name, other, [c for c in seen.checks if other in c.causes], comes_back=ill)


def _rivals(history: History, diagnosis: Diagnosis) -> list[Cause]:
    """Return the other causes of the table that can lead to the finding, the likeliest first."""
    leading = diagnosis.findings[0]
    holds = conditions_of(history, leading)
    able = [c for c in CAUSES if leading.kind in c.leads and c.requires <= holds and not c.excludes & holds]
    able.sort(key=lambda c: -c.leads[leading.kind])
    return [c for c in able if c.id != diagnosis.cause_id]


def _rehearsed(theatre: Theatre, finding: Finding, made: Sequence[Remedy], seen: _Seen) -> list[Check]:
    """Return what comes of training with each remedy that a config can express, up to the first that heals."""
    changes = [Change.of(r) for r in made if r.patch] if seen.comes_back else []
    return _first_that_heals(theatre, finding, changes, seen.midway)


def _first_that_heals(
    theatre: Theatre, finding: Finding, changes: Sequence[Change], midway: Midway | None
) -> list[Check]:
    made: list[Check] = []
    for change in changes:
        if is_taken(theatre.run, change):
            made.append(_tried(theatre, finding, change, midway))
            if made[-1].gone and made[-1].is_healthy:
                break  # they come smallest first
    return made


def _tried(theatre: Theatre, finding: Finding, change: Change, midway: Midway | None) -> Check:
    """Train with one change from the recorded state, where it can be made there.

    What does not help that late may have helped from the start, and is tried from there before it counts as refuted.
    """
    late = _changed(theatre, finding, change, midway) if midway and midway.takes(change.patch) else None
    if late and late.gone:
        return late
    early = _changed(theatre, finding, change, None)
    return late if late and early.gone is None else early


def _changed(theatre: Theatre, finding: Finding, change: Change, midway: Midway | None) -> Check:
    """Train with one change, and look for the finding."""
    steps = theatre.steps_for(finding)
    try:
        made = theatre.rehearse(dict(change.patch), steps=steps, midway=midway)
    except (GradwatchError, RuntimeError) as error:
        return Check(text=change.text, result=f"cannot be trained: {str(error).splitlines()[0]}", gone=None)
    if made is None:
        return Check(text=change.text, result="no time left to train with it", gone=None)
    found = made.found(finding)
    gone = not found if found or made.history.step >= finding.step else None  # it may end before by itself
    others = sorted({f.kind for f in made.alarms} - set(same_illness(finding.kind)))
    told = f"{_span(made)}, loss {made.loss:.4g}: " + (f"{found[0].kind} again" if found else f"no {finding.kind}")
    told += f", but {', '.join(others)}" if gone and others else ""
    return Check(
        text=change.text,
        result=told,
        gone=gone,
        change=change,
        is_healthy=not made.alarms,
        began_at=made.began_at,
    )


def _taken_back(theatre: Theatre, finding: Finding, seen: _Seen) -> list[Check]:
    """Return what comes of setting the config's own choices back one by one, up to the first that mends it."""
    changes, located = list(taken_back(config_of(theatre.run))), seen.located
    if located and located.operation.module_type == "":  # outside of the model: the loss comes first
        changes.sort(key=lambda c: not any(key.split(".")[0] == "loss" for key in c.patch))
    return _first_that_heals(theatre, finding, changes, seen.midway)


def _judged(name: str, cause_id: str, checks: Sequence[Check], *, comes_back: bool) -> Tested:
    known = [c.gone for c in checks if c.gone is not None]
    status: Status = "open"
    if comes_back and known:
        status = "confirmed" if any(known) else "refuted"
    return Tested(cause=name, cause_id=cause_id, status=status, checks=tuple(checks))
