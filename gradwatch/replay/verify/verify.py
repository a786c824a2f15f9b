"""Verify a diagnosis: change one thing at a time, run again, and check whether the symptom is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from gradwatch.diagnose.case import Case
from gradwatch.diagnose.causes import CAUSES, Cause, cause_of
from gradwatch.diagnose.conditions import conditions_of
from gradwatch.diagnose.remedies import remedies
from gradwatch.diagnose.run_numbers import RunNumbers, measure_run
from gradwatch.errors import GradwatchError
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.replay.config_change import config_of, is_taken, reverted_settings
from gradwatch.replay.locate import bad_samples
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate_in_run import locate_step
from gradwatch.replay.restore.restored_step import RestoredStep, restore_step
from gradwatch.replay.restore.warm_start import WarmStart
from gradwatch.replay.trials.runner import TrialRunner
from gradwatch.replay.trials.trial_run import NON_FINITE, TrialRun, same_problem
from gradwatch.replay.verify.interventions import Intervention, interventions
from gradwatch.replay.verify.result import Experiment, Status, TestedCause, Verification
from gradwatch.replay.verify.symptom import KINDS, Symptom, observe

AXES = {
    "data": ("this batch", "other batches"),
    "state": ("the trained weights", "the initial weights"),
    "numerics": ("the number format", "float32"),
    "chance": ("the random numbers of this step", "other random numbers"),
}
"""Factors that a symptom may depend on: the words if it does, and the words if it does not."""


def verify(runner: TrialRunner, diagnoses: Sequence[Diagnosis]) -> tuple[Verification, ...]:
    """Confirm or refute each diagnosis of a run, and skip diagnoses of severity INFO.

    Args:
        runner: Trains changed configs of the run, and does not modify its directory.
        diagnoses: Diagnoses of the run.
    """
    return tuple(_verify_one(runner, d) for d in diagnoses if d.severity > Severity.INFO)


def _verify_one(runner: TrialRunner, diagnosis: Diagnosis) -> Verification:
    began = time.perf_counter()
    finding = diagnosis.findings[0]
    facts = measure_run(runner.history, until=finding.step)
    warm_start = runner.warm_start(finding)
    # a single step first: it is faster than a training, but shows only some kinds of findings
    seen = _reproduce_step(runner, finding, facts, warm_start) if finding.kind in KINDS else None
    if seen is None or not seen.reproduced:
        seen = _reproduce_training(runner, finding, warm_start, located=seen.located if seen else None)
    causes = tuple(_test_causes(runner, diagnosis, seen))
    ids = {tested.cause_id for tested in causes}
    other_experiments = [c for c in seen.experiments if not ids & set(c.causes) and c.axis != "look"]
    # no config change helps so far: the cause may be a setting that no cause of the table covers
    if seen.reproduced and not any(c.gone and c.change and c.is_healthy for t in causes for c in t.experiments):
        other_experiments += _try_reverted_settings(runner, finding, seen)
    return Verification(
        finding=finding,
        control=seen.control,
        reproduced=seen.reproduced,
        located=seen.located,
        dependence=_describe_dependence(seen.experiments),
        causes=causes,
        other_experiments=tuple(other_experiments),
        seconds=time.perf_counter() - began,
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Reproduction:
    """The result without a change and the results with one change each; trials begin at `warm_start`."""

    control: str
    reproduced: bool
    located: Located | None
    warm_start: WarmStart | None
    experiments: tuple[Experiment, ...] = ()


def _reproduce_step(
    runner: TrialRunner, finding: Finding, facts: RunNumbers, warm_start: WarmStart | None
) -> _Reproduction | None:
    """Run the step of a finding alone from its recorded state; return None if that state cannot be restored."""
    runner.progress(f"repeating step {finding.step:,}")
    with contextlib.ExitStack() as stack:
        try:
            restored = stack.enter_context(restore_step(runner.run, finding.step))
        except GradwatchError:  # for example data that have changed: a training from the start may still reproduce it
            return None
        symptom = Symptom.of(finding, restored, usual_norm=facts.usual_norm)
        control, reproduced = _run_control(restored, symptom)
        located = locate_step(restored) if finding.kind in NON_FINITE else None
        tried = interventions(restored, symptom, located) if reproduced else ()
        made = [experiment for i in tried for experiment in _run_intervention(i, symptom)]
        made += _check_data(restored) if located else []
        return _Reproduction(
            control=control, reproduced=reproduced, located=located, warm_start=warm_start, experiments=tuple(made)
        )


def _check_data(restored: RestoredStep) -> list[Experiment]:
    """Return an experiment that speaks against bad data if the batch is finite, else no experiment."""
    if any(bad_samples.not_finite(batch) for batch in restored.window):
        return []
    result = "every value is finite"
    return [Experiment(text="check of the batch", result=result, gone=False, causes=("bad-data",), axis="look")]


def _reproduce_training(
    runner: TrialRunner, finding: Finding, warm_start: WarmStart | None, *, located: Located | None
) -> _Reproduction:
    """Reproduce a finding by training from the recorded state, or else from the start, and with another seed."""
    control, reproduced = _train_again(runner, finding, warm_start)
    if warm_start and not reproduced:  # the problem may have begun before the recorded state
        warm_start = None
        control, reproduced = _train_again(runner, finding, None)
    made = (_try_other_seed(runner, finding),) if reproduced else ()
    return _Reproduction(
        control=control, reproduced=reproduced, located=located, warm_start=warm_start, experiments=made
    )


def _run_control(restored: RestoredStep, symptom: Symptom) -> tuple[str, bool]:
    """Run an unchanged step twice; return the result in words, and whether both runs show the symptom."""
    first, second = observe(restored, symptom), observe(restored, symptom)
    same = repr(first) == repr(second)  # as text, since nan is not equal to nan
    result = f"step {restored.step:,} run twice: {symptom.describe(first)}"
    result += ", bit-identical" if same else f", then {symptom.describe(second)}: not deterministic"
    return result, symptom.is_in(first) and symptom.is_in(second)


def _train_again(runner: TrialRunner, finding: Finding, warm_start: WarmStart | None) -> tuple[str, bool]:
    steps = runner.steps_for(finding)
    runner.progress(f"repeating the run, to see {finding.kind} again")
    again = runner.run_trial({}, steps=steps, warm_start=warm_start)
    if again is None:
        return f"no time to repeat {steps:,} training steps", False
    found = again.found(finding)
    result = f"repeated {_span(again)}"
    if not found:
        return f"{result}: no {finding.kind}", False
    return f"{result}: {finding.kind} at step {found[0].step:,}, as before", True


def _span(made: TrialRun) -> str:
    return f"{made.steps:,} training steps" + (f" from step {made.start_step:,}" if made.start_step else "")


def _try_other_seed(runner: TrialRunner, finding: Finding) -> Experiment:
    """Train with another seed: other initial weights, another order of the data, other random numbers."""
    seed = config_of(runner.run).run.seed + 1
    change = Remedy(text=f"seed {seed} instead", patch={"run.seed": seed})
    runner.progress(f"trying seed {seed}")
    # from the start, where a seed acts; without a change, since another seed is not a remedy
    return replace(_train_with(runner, finding, change, None), change=None, axis="chance")


def _run_intervention(intervention: Intervention, symptom: Symptom) -> Iterator[Experiment]:
    """Run all variants of an intervention; yield nothing if it does not apply."""
    try:
        outcomes = intervention.run()
    except (RuntimeError, ValueError, TypeError) as error:  # a change that the model does not support
        gone, result = None, f"cannot run: {str(error).splitlines()[0]}"
    else:
        if not outcomes:
            return
        shown = [o for o in outcomes if symptom.is_in(o)]
        # gone only if no variant shows the symptom; the first bad outcome is the more telling one
        gone, result = not shown, symptom.describe((shown or outcomes)[0])
        if len(outcomes) > 1:
            result = f"symptom in {len(shown)} of {len(outcomes)}; {result}"
    yield Experiment(
        text=intervention.text, result=result, gone=gone, causes=intervention.causes, axis=intervention.axis
    )


def _describe_dependence(experiments: Sequence[Experiment]) -> str:
    """Describe the factors that the symptom depends on, or else the changes that it survives."""
    # a symptom depends on a factor if it is gone with another value of the factor
    needed = [factor for axis, (factor, _) in AXES.items() if any(c.axis == axis and c.gone for c in experiments)]
    if needed:
        alone = " together (one alone is not enough)" if len(needed) > 1 else ""
        return f"needs {' and '.join(needed)}{alone}"
    kept = [other for axis, (_, other) in AXES.items() if any(c.axis == axis and c.gone is False for c in experiments)]
    return f"also appears with {' and '.join(kept)}" if kept else ""


def _test_causes(runner: TrialRunner, diagnosis: Diagnosis, seen: _Reproduction) -> Iterator[TestedCause]:
    """Yield the diagnosed cause, then its rivals if it is not confirmed or an experiment supports them."""
    leading, is_reproduced = diagnosis.findings[0], seen.reproduced
    own = [c for c in seen.experiments if diagnosis.cause_id in c.causes]
    own += _try_remedies(runner, leading, diagnosis.remedies, seen)
    tested = _conclude(diagnosis.cause, diagnosis.cause_id, own, reproduced=is_reproduced)
    yield tested
    rivals = _rivals(runner.history, diagnosis)
    for cause in rivals:
        experiments = [c for c in seen.experiments if cause.id in c.causes]
        if tested.status == "confirmed" and not any(c.gone for c in experiments):
            continue
        if not experiments:  # no single step tests this cause, so its remedies are trained with
            made = remedies(cause.remedies, Case.of(runner.history, diagnosis.findings))
            experiments += _try_remedies(runner, leading, made, seen)
        if experiments:
            yield _conclude(cause.name, cause.id, experiments, reproduced=is_reproduced)
    # causes that are not rivals, but that an experiment supports
    known = {diagnosis.cause_id, *(cause.id for cause in rivals)}
    for other in dict.fromkeys(i for c in seen.experiments if c.gone for i in c.causes if i not in known):
        yield _conclude(
            cause_of(other).name, other, [c for c in seen.experiments if other in c.causes], reproduced=is_reproduced
        )


def _rivals(history: History, diagnosis: Diagnosis) -> list[Cause]:
    """Return the other causes of the table that can lead to the finding, the most likely first."""
    leading = diagnosis.findings[0]
    holds = conditions_of(history, leading)
    able = [c for c in CAUSES if leading.kind in c.leads and c.requires <= holds and not c.excludes & holds]
    able.sort(key=lambda c: -c.leads[leading.kind])
    return [c for c in able if c.id != diagnosis.cause_id]


def _try_remedies(
    runner: TrialRunner, finding: Finding, made: Sequence[Remedy], seen: _Reproduction
) -> list[Experiment]:
    # without a reproduced symptom, a training would show nothing
    changes = [r for r in made if r.patch] if seen.reproduced else []
    return _try_until_gone(runner, finding, changes, seen.warm_start)


def _try_until_gone(
    runner: TrialRunner, finding: Finding, changes: Sequence[Remedy], warm_start: WarmStart | None
) -> list[Experiment]:
    made: list[Experiment] = []
    taken = [change for change in changes if is_taken(runner.run, change)]
    for i, change in enumerate(taken):
        runner.progress(f"trying {i + 1} of {len(taken)}: {change.text}")
        made.append(_try_change(runner, finding, change, warm_start))
        if made[-1].gone and made[-1].is_healthy:
            break  # remedies come smallest first, so the others are larger than needed
    return made


def _try_change(runner: TrialRunner, finding: Finding, change: Remedy, warm_start: WarmStart | None) -> Experiment:
    """Train with one change, from the recorded state if the change can be made there.

    A change that does not help at this state may help from the start. It is trained from the start as well before it
    counts as refuted.
    """
    late = (
        _train_with(runner, finding, change, warm_start) if warm_start and warm_start.supports(change.patch) else None
    )
    if late and late.gone:
        return late
    early = _train_with(runner, finding, change, None)
    # without a result from the start, such as for lack of time, the late result stands
    return late if late and early.gone is None else early


def _train_with(runner: TrialRunner, finding: Finding, change: Remedy, warm_start: WarmStart | None) -> Experiment:
    """Train with one change, and check for the finding."""
    steps = runner.steps_for(finding)
    try:
        made = runner.run_trial(dict(change.patch), steps=steps, warm_start=warm_start)
    except (GradwatchError, RuntimeError) as error:  # a failed training neither confirms nor refutes
        return Experiment(text=change.text, result=f"training failed: {str(error).splitlines()[0]}", gone=None)
    if made is None:
        return Experiment(text=change.text, result="not tried: out of time", gone=None)
    found = made.found(finding)
    # unknown if the training ended before the step of the finding
    gone = not found if found or made.history.step >= finding.step else None
    others = sorted({f.kind for f in made.alarms} - set(same_problem(finding.kind)))
    result = f"{_span(made)}, loss {made.loss:.4g}: " + (f"{found[0].kind} again" if found else f"no {finding.kind}")
    result += f", but {', '.join(others)}" if gone and others else ""
    return Experiment(
        text=change.text,
        result=result,
        gone=gone,
        change=change,
        is_healthy=not made.alarms,
        start_step=made.start_step,
    )


def _try_reverted_settings(runner: TrialRunner, finding: Finding, seen: _Reproduction) -> list[Experiment]:
    changes, located = list(reverted_settings(config_of(runner.run))), seen.located
    if located and located.operation.module_type == "":  # outside of all modules: the loss function is tried first
        changes.sort(key=lambda c: not any(key.split(".")[0] == "loss" for key in c.patch))
    return _try_until_gone(runner, finding, changes, seen.warm_start)


def _conclude(name: str, cause_id: str, experiments: Sequence[Experiment], *, reproduced: bool) -> TestedCause:
    # one change that removes the symptom confirms; a refutation needs all changes to fail
    known = [c.gone for c in experiments if c.gone is not None]
    status: Status = "open"
    if reproduced and known:
        status = "confirmed" if any(known) else "refuted"
    return TestedCause(cause=name, cause_id=cause_id, status=status, experiments=tuple(experiments))
