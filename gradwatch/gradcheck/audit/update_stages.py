"""Judge what a step does with its gradient: unscale, clip, update, write back, schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwatch.gradcheck.audit.by_hand import TOLERANCE, flat, multiple
from gradwatch.gradcheck.audit.case import AuditedStep, Outcome
from gradwatch.gradcheck.audit.events import StepEvent
from gradwatch.gradcheck.audit.formulas import has_formula, updated
from gradwatch.gradcheck.audit.result import Deviation
from gradwatch.gradcheck.audit.windows import Window, is_zero
from gradwatch.gradcheck.stepping.tensors import norm
from gradwatch.probe.device.sync import to_float

TOLERANCE_ULPS = 8
"""Tolerance of the update, in units of its change if its inputs change by one unit in the last place."""
MIN_DEVIATION = 1e-3
"""Minimum deviation to report, as a fraction of the update."""
LOST_FRAC = 0.9
"""Maximum fraction of the weights, 0..1, that rounding may leave unchanged in an update."""


def judge_unscale(case: AuditedStep, window: Window) -> Outcome:
    """Check that no loss scale is left in the gradient of the update."""
    scaled = [p for p in window.used if p.scale != 1.0]
    if not scaled:
        return "no loss was scaled"
    scale, number = scaled[0].scale, len(window.used)
    times = [e for e in window.events if e.kind == "unscale" and set(e.watched) & set(case.held)]
    by_hand = [c for c in case.changes(window) if any(abs(c.factor * scale * n - 1) <= TOLERANCE for n in (1, number))]
    divided = len(times) + len(by_hand) + ("grad_scale" in window.update.limit)
    if times and window.events.index(times[0]) < window.events.index(scaled[-1]):
        text = "the gradients are unscaled before the last backward pass: scaled and unscaled ones are added"
        return Deviation(kind="unscaled-early", text=text, place=times[0].place)
    if divided == 0:
        text = (
            f"the loss is scaled by {scale:g}, but the gradients are not divided by it before the update; "
            "call scaler.step(optimizer)"
        )
        return Deviation(kind="not-unscaled", text=text, place=window.update.place, ratio=scale)
    if divided > 1:
        text = f"the gradients are divided {divided} times by the scale of the loss, {scale:g}"
        place = by_hand[0].after.place if by_hand else times[-1].place
        return Deviation(kind="unscaled-twice", text=text, place=place, ratio=scale ** (1 - divided))
    return ""


def judge_clip(case: AuditedStep, window: Window, after: Sequence[StepEvent]) -> Outcome:
    """Check that clipping comes right before the update, and covers its parameters.

    Args:
        case: The step.
        window: The update.
        after: Events after the last update.
    """
    clips = [e for e in window.events if e.kind == "clip"]
    own = [e for e in clips if set(e.watched) & set(case.held) and not e.limit["empty"]]
    if not own:
        return _wrong_clip(case, window, clips, after)
    first, last = own[0], own[-1]
    position = {id(e): i for i, e in enumerate(window.events)}
    unscaled = [position[id(e)] for e in window.events if e.kind == "unscale"]
    unscaled += [position[id(c.after)] for c in case.changes(window) if math.isfinite(c.factor)]
    scaled = [p for p in window.used if p.scale != 1.0 and position[id(p)] < position[id(first)]]
    if scaled and not any(i < position[id(first)] for i in unscaled):
        scale = scaled[0].scale
        text = (
            f"the gradients are clipped to {first.limit['limit']:g} while they are {scale:g} times too large; call "
            "scaler.unscale_(optimizer) before the clipping"
        )
        return Deviation(kind="clip-before-unscale", text=text, place=first.place, ratio=1 / scale)
    later = [p for p in window.used if position[id(p)] > position[id(last)]]
    if later and case.are_micro(window.used):
        text = "the gradients are clipped before those of the last micro-batch are added"
        return Deviation(kind="clip-before-the-sum", text=text, place=last.place)
    return ""


def _wrong_clip(case: AuditedStep, window: Window, clips: Sequence[StepEvent], after: Sequence[StepEvent]) -> Outcome:
    updated_ones = {i for e in case.events if e.kind == "update" for i in e.watched}
    late = list(itertools.takewhile(lambda e: e.kind != "backward", after))
    for event in (e for e in late if e.kind == "clip" and set(e.watched) & set(case.held)):
        text = "the gradients are clipped after the update, which used them unclipped"
        return Deviation(kind="clip-after-update", text=text, place=event.place)
    for event in clips:
        others = set(event.watched) - set(case.held)
        if event.limit["empty"] and not others & updated_ones and window.passes:
            what = "parameters without a gradient" if event.watched else "no parameter of the model or the optimizer"
            text = f"the clipping has no effect: it gets {what}; clip those that the optimizer updates"
            return Deviation(kind="clip-of-wrong-parameters", text=text, place=event.place)
        if others and not others & updated_ones and not set(event.watched) & set(case.held):
            text = f"the clipping is of {case.listed(sorted(others))}, which the optimizer does not update"
            return Deviation(
                kind="clip-of-wrong-parameters", text=text, place=event.place, tensors=case.tensors(sorted(others))
            )
    return "no clipping by a function of torch"


def judge_update(case: AuditedStep, window: Window) -> Outcome:
    """Compare the new weights with the plain formula of the optimizer."""
    decayed = _decayed_by_hand(case, window)
    if decayed is not None:
        return decayed
    if window.has_closure:
        return "the optimizer runs the step as a closure"
    optimizer = window.update.owner
    if not has_formula(optimizer):
        return f"there is no plain formula for {type(optimizer).__name__}"
    if window.update.limit.get("found_inf"):
        return "the gradient is not finite, and the update was left out"
    wrong: dict[int, float] = {}
    for i in window.update.watched:
        ratio = _ratio_to_the_formula(case, window.update, i)
        if ratio is not None:
            wrong[i] = ratio
    if not wrong:
        return ""
    ratio = next(iter(wrong.values()))
    text = f"the update of {case.listed(list(wrong))} is not that of {type(optimizer).__name__} with its settings"
    return Deviation(
        kind="not-the-formula", text=text, place=window.update.place, ratio=ratio, tensors=case.tensors(list(wrong))
    )


def _ratio_to_the_formula(case: AuditedStep, update: StepEvent, index: int) -> float | None:
    """Return the update over the update of the formula, or None if they agree up to rounding."""
    grad, old, new = update.before.grads[index], update.before.weights[index], update.after.weights[index]
    if grad is None or grad.is_complex() or not grad.isfinite().all():
        return None
    scale = update.limit.get("grad_scale", 1.0)
    group, state = case.group_of(index, update), update.state.get(index, {})

    def formula(weight: Tensor, gradient: Tensor) -> Tensor:
        return updated(update.owner, weight, gradient, group, state)

    weight, gradient = old.double(), grad.double() / scale
    meant = formula(weight, gradient)
    generator = torch.Generator().manual_seed(0)
    epsilon = torch.finfo(old.dtype).eps
    signs = [(torch.randint(0, 2, t.shape, generator=generator) * 2 - 1).to(t) for t in (weight, gradient)]
    moved = formula(weight * (1 + epsilon * signs[0]), gradient * (1 + epsilon * signs[1]))
    noise = TOLERANCE_ULPS * (norm(moved - meant) + epsilon * norm(meant))
    step = meant - weight
    error = norm(new.double() - meant)
    if error <= noise + MIN_DEVIATION * norm(step):
        return None
    return to_float(((new.double() - weight) * step).sum() / (step * step).sum()) if norm(step) else math.inf


def _decayed_by_hand(case: AuditedStep, window: Window) -> Deviation | None:
    """Report weights that also shrink outside of the optimizer."""
    decayed = case.decayed(window)
    position = next(i for i, e in enumerate(case.events) if e is window.update)
    for event, later in itertools.pairwise(case.events[: position + 2]):
        if not decayed or (later.kind == "update" and window.has_closure):
            continue
        old, new = ([e.weights[i] for i in decayed] for e in (event.after, later.before))
        if all(torch.equal(a, b) for a, b in zip(old, new, strict=True)):
            continue
        before = flat(old)
        rounding = 4 * max(torch.finfo(t.dtype).eps for t in new) * norm(before)
        factor = 1 + multiple(flat(new) - before, before, noise=rounding)
        group = case.group_of(decayed[0], window.update)
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if (
            math.isfinite(factor)
            and 0 < factor < 1
            and any(abs(1 - factor - d) < 0.05 * d for d in (decay, lr * decay))
        ):
            text = (
                f"the weights decay twice: by hand by a factor of {factor:.8g}, and by weight_decay={decay:g} of the "
                "optimizer; keep one of them"
            )
            place = later.place if later.kind == "update" else event.place
            return Deviation(kind="decay-twice", text=text, place=place, tensors=case.tensors(decayed))
    return None


def judge_write_back(case: AuditedStep, window: Window) -> Outcome:
    """Compare the weights at the end of the step with the weights right after the update."""
    end, update = case.events[-1].after, window.update
    changed = [i for i in update.watched if not torch.equal(update.before.weights[i], update.after.weights[i])]
    if changed and all(torch.equal(end.weights[i], update.before.weights[i]) for i in changed):
        text = "the update is undone: at the end of the step the weights are what they were before it"
        return Deviation(kind="update-undone", text=text, place=update.place, ratio=0.0)
    if window.has_closure or not has_formula(update.owner):
        return "" if changed else "the weights did not change"
    lost = total = 0
    for i in update.watched:
        grad = update.before.grads[i]
        if grad is None or is_zero(grad) or float(case.group_of(i, update)["lr"]) == 0 or grad.is_complex():
            continue
        moves = grad != 0
        total += int(moves.sum())
        lost += int((moves & (update.before.weights[i] == update.after.weights[i])).sum())
    if total and lost > LOST_FRAC * total:
        dtype = str(case.watched[update.watched[0]].dtype).removeprefix("torch.")
        text = (
            f"{100 * lost / total:.0f} % of the weights did not move: the update is smaller than the spacing of "
            f"{dtype}; keep the weights in float32, or raise the learning rate"
        )
        return Deviation(kind="update-lost", text=text, place=update.place, ratio=1 - lost / total)
    return ""


def judge_schedule(case: AuditedStep) -> Outcome:
    """Compare the number and order of the scheduler's steps with the updates."""
    updates = [w.update for w in case.windows]
    steps = [e for e in case.events if e.kind == "schedule" and _is_of(case, e)]
    if not steps:
        return "no scheduler steps"
    order = {id(e): i for i, e in enumerate(case.events)}
    if updates and order[id(steps[0])] < order[id(updates[0])]:
        text = "the scheduler steps before the optimizer, so that the first learning rate is skipped"
        return Deviation(kind="schedule-before-update", text=text, place=steps[0].place)
    for scheduler in dict.fromkeys(e.owner for e in steps):
        times = [e for e in steps if e.owner is scheduler]
        if updates and len(times) > len(updates):
            text = (
                f"{type(scheduler).__name__} steps {len(times)} times for {len(updates)} "
                f"update{'s' if len(updates) > 1 else ''}: the learning rate runs ahead"
            )
            ratio = len(times) / len(updates)
            return Deviation(kind="scheduled-twice", text=text, place=times[-1].place, ratio=ratio)
    return ""


def _is_of(case: AuditedStep, event: StepEvent) -> bool:
    owner = getattr(event.owner, "optimizer", None)
    if owner is None:  # a chain of schedulers
        return False
    held = {id(case.watched[i]) for i in case.held}
    return any(id(p) in held for group in owner.param_groups for p in group["params"])
