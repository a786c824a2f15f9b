"""Judge whether the optimizer holds the parameters of the model, and updates them once for each gradient."""

from __future__ import annotations

from torch import Tensor

from gradwatch.gradcheck.audit.case import AuditedStep
from gradwatch.gradcheck.audit.events import StepEvent
from gradwatch.gradcheck.audit.result import Deviation
from gradwatch.gradcheck.audit.windows import is_zero


def judge_parameters(case: AuditedStep) -> Deviation | None:
    """Report that the optimizer holds the wrong parameters."""
    return _stale(case) or _left_out(case) or _frozen(case)


def judge_order(case: AuditedStep) -> Deviation | str | None:
    """Report missing, repeated or early updates; a text if the events do not show it, None if all are right."""
    if not case.windows:
        return _no_update(case)
    first, *others = case.windows
    later = any(_gives(case, e) for e in case.events[case.events.index(first.update) :] if e.kind == "backward")
    if not first.passes and not first.has_old and later:
        text = "the optimizer steps before the backward pass, after the gradients are set to zero: it gets none"
        return Deviation(kind="update-before-backward", text=text, place=first.update.place)
    for window in others:
        if not window.passes and any(not is_zero(window.update.before.grads[i]) for i in case.held):
            text = "the optimizer steps twice with the same gradient"
            return Deviation(kind="updated-twice", text=text, place=window.update.place, ratio=2.0)
    return None


def _no_update(case: AuditedStep) -> Deviation | str:
    skipped = [e for e in case.events if e.kind == "no-update" and set(e.watched) & set(case.held)]
    if skipped:
        return f"the GradScaler left out the update: a gradient is not finite at the scale {skipped[0].scale:g}"
    passes = [e for e in case.events if e.kind == "backward" and _gives(case, e)]
    if not passes:
        return "neither a backward pass nor an update of these parameters"
    zeroed = [e for e in case.events if e.kind == "zero" and any(is_zero(e.after.grads[i]) for i in case.held)]
    if not zeroed:
        return "no update; if the step is one of several that add up a gradient, audit all of them as one"
    text = "the gradients are set to zero and made, but optimizer.step() is not called"
    return Deviation(kind="update-skipped", text=text, place=passes[-1].place, ratio=0.0)


def _stale(case: AuditedStep) -> Deviation | None:
    """Report that the optimizer holds tensors that the model has lost."""
    live = {id(case.watched[i]) for i in case.own}
    gone = [i for i in case.held if id(case.watched[i]) not in live]
    gone = [i for i in gone if not any(_has_grad(e, i) for e in case.events)]
    shapes = {case.watched[i].shape for i in gone}
    missing = [i for i in case.own if i not in case.held and case.watched[i].shape in shapes]
    moved = [i for i in missing if case.events[0].after.weights[i] is not case.events[-1].after.weights[i]]
    missing = [i for i in missing if i not in case.elsewhere and any(_has_grad(e, i) for e in case.events)]
    if not missing or moved:  # weights that are copied from masters are not lost
        return None
    text = (
        f"the optimizer holds {len(gone)} tensor{'s' if len(gone) > 1 else ''} that the model does not use, and not "
        f"{case.listed(missing)}: build the optimizer after the model is copied, moved or changed"
    )
    place = case.windows[0].update.place if case.windows else case.events[0].place
    return Deviation(kind="stale-parameters", text=text, place=place, ratio=0.0, tensors=case.tensors(missing))


def _left_out(case: AuditedStep) -> Deviation | None:
    """Report a small part of the model that gets gradients but is in no param group."""
    trained = [i for i in case.own if case.watched[i].requires_grad]
    out = [i for i in trained if i not in case.held and i not in case.elsewhere]
    out = [i for i in out if any(_has_grad(e, i) for e in case.events)]
    moved = [i for i in out if case.events[0].after.weights[i] is not case.events[-1].after.weights[i]]
    if not out or moved or not case.is_minority(out, trained):
        return None
    text = (
        f"{case.listed(out)} gets gradients, but is in no param group: it is never updated; if that is on purpose, set "
        "requires_grad to False"
    )
    place = case.windows[0].update.place if case.windows else case.events[0].place
    return Deviation(kind="not-in-a-group", text=text, place=place, ratio=0.0, tensors=case.tensors(out))


def _frozen(case: AuditedStep) -> Deviation | None:
    """Report a small frozen part of the optimizer's parameters on which the loss depends."""
    frozen = [i for i in case.held if i in case.own and not case.watched[i].requires_grad]
    if not frozen or not case.is_minority(frozen, case.held):
        return None
    if case.losses_move is None or not case.losses_move(frozen):
        return None
    text = (
        f"{case.listed(frozen)} has requires_grad=False, but the optimizer holds it and the loss depends on it: it is "
        "never updated; if that is on purpose, leave it out of the optimizer"
    )
    place = case.windows[0].update.place if case.windows else case.events[0].place
    return Deviation(kind="frozen", text=text, place=place, ratio=0.0, tensors=case.tensors(frozen))


def _has_grad(event: StepEvent, index: int) -> bool:
    grad: Tensor | None = event.after.grads[index]
    return not is_zero(grad)


def _gives(case: AuditedStep, event: StepEvent) -> bool:
    return any(
        event.before.grads[i] is not event.after.grads[i] and not is_zero(event.after.grads[i]) for i in case.held
    )
