"""Judge how a step makes the gradient of its update: the loss, the gradient of each pass, and their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwatch.gradcheck.audit.by_hand import TOLERANCE, flat, multiple
from gradwatch.gradcheck.audit.case import AuditedStep, Outcome
from gradwatch.gradcheck.audit.events import LossCall, StepEvent
from gradwatch.gradcheck.audit.result import Deviation
from gradwatch.gradcheck.audit.windows import Window, is_zero

NO_PASSES = "no backward pass gives a gradient to this optimizer"
MAX_DIVISOR = 4096
"""Largest divisor of the loss that may be a number of micro-batches."""


def judge_loss(case: AuditedStep, window: Window) -> Outcome:
    """Compare the weight of each micro-batch with its weight in a mean over the whole batch."""
    passes = window.used
    if not passes:
        return NO_PASSES
    if len(passes) == 1:
        return ""
    if not case.are_micro(passes):
        return f"{len(passes)} backward passes that are not for certain micro-batches of one batch"
    if any(t._backward_hooks or t._post_accumulate_grad_hooks for t in case.watched):
        return "hooks change the gradients"
    number = len(passes)
    factor = math.prod(
        c.factor for c in case.changes(window) if math.isfinite(c.factor) and not _unscales(c.factor, passes)
    )
    columns = list(_columns(passes))
    if not columns:
        return "no loss function of torch, and no mean or sum, was seen"
    for calls in columns:
        shares = [_share(c, p) * factor for c, p in zip(calls, passes, strict=True)]
        if not all(_is_near(s, shares[0]) for s in shares):
            continue
        if _is_near(shares[0], 1.0):
            text = (
                f"the loss of each of {number} micro-batches is not divided by their number: the gradient is {number} "
                f"times that of the mean over the batch; divide each loss by {number}"
            )
            return Deviation(kind="loss-not-divided", text=text, place=passes[0].place, ratio=float(number))
        divisor = round(1 / shares[0]) if shares[0] > 1 / MAX_DIVISOR else 0
        if any(c.is_loss for c in calls) and divisor > number and _is_near(shares[0] * divisor, 1.0):
            text = (
                f"the loss of each of {number} micro-batches is divided by {divisor}: the gradient is "
                f"{number}/{divisor} times that of the mean over the batch; divide by {number}, the number of this step"
            )
            return Deviation(kind="wrong-divisor", text=text, place=passes[0].place, ratio=number / divisor)
    return ""


def judge_gradient(case: AuditedStep, window: Window) -> Outcome:
    """Compare the gradient with the loss's own: find a second weight decay, or a part without gradient."""
    if not window.passes:
        return NO_PASSES
    return _decay_in_the_loss(case, window) or _decay_in_the_gradient(case, window) or _dropped(case, window)


def judge_sum(case: AuditedStep, window: Window) -> Outcome:
    """Compare the gradient of the update with the sum over the passes of this step."""
    first = window.passes[0].place if window.passes else window.update.place
    if window.has_old and window.passes:
        ratio = _ratio_with_old(case, window)
        text = (
            "the gradient of an earlier step is added to the one of this step, since nothing sets it to zero between "
            "the update and the next backward pass; call optimizer.zero_grad()"
        )
        return Deviation(kind="zero-grad-missing", text=text, place=first, ratio=ratio)
    zeroed = [e for e in window.events if e.kind == "zero"]
    place = zeroed[-1].place if zeroed else window.update.place
    if window.passes and not window.used:
        text = "the gradients are set to zero between the backward pass and the update, which gets none of them"
        return Deviation(kind="zeroed-before-update", text=text, place=place, ratio=0.0)
    dropped = [p for p in window.passes if not any(p is u for u in window.used)]
    if dropped and case.are_micro(window.passes) and not _weights_moved(window):
        text = (
            f"the gradients are set to zero between micro-batches: the update gets {len(window.used)} of "
            f"{len(window.passes)}; call zero_grad() once for each update"
        )
        ratio = len(window.used) / len(window.passes)
        return Deviation(kind="zeroed-between-micro-batches", text=text, place=place, ratio=ratio)
    return _means_of_means(case, window) or ("" if window.passes else NO_PASSES)


def _means_of_means(case: AuditedStep, window: Window) -> Outcome:
    """Report micro-batches of unequal size that have the same weight."""
    passes = window.used
    if not case.are_micro(passes):
        return ""
    for calls in _columns(passes):
        shares = [_share(c, p) for c, p in zip(calls, passes, strict=True)]
        counts = [c.count for c in calls]
        if all(c.reduction == "mean" and c.is_loss for c in calls) or all(_is_near(s, 1 / len(passes)) for s in shares):
            is_unequal = len(set(counts)) > 1 and all(_is_near(s, shares[0]) for s in shares)
        else:  # a sum that is divided by its own count
            divisors = [c.count / s for c, s in zip(calls, shares, strict=True) if s]
            is_whole = len(divisors) == len(calls) and all(_is_near(d, round(d)) and d >= 1 for d in divisors)
            is_sum = all(c.reduction == "sum" for c in calls)
            is_unequal = is_sum and is_whole and not all(_is_near(d, divisors[0]) for d in divisors)
            counts = divisors
        if is_unequal and len(set(counts)) > 1:
            numbers = ", ".join(f"{n:g}" for n in counts)
            largest = max(counts) * len(counts) / sum(counts)
            text = (
                f"micro-batches with unequal counts ({numbers}) have the same weight: a mean of means is not the mean "
                "over the batch; sum the losses, and divide by the count of the whole batch"
            )
            return Deviation(kind="mean-of-means", text=text, place=passes[0].place, ratio=1 / largest)
    return ""


def _decay_in_the_loss(case: AuditedStep, window: Window) -> Outcome:
    for step in window.used:
        found = {}
        for i in case.decayed(window):
            for term in step.terms.get(i, []):
                weight = flat([step.before.weights[i]])
                factor = multiple(flat([term]), weight) / step.scale
                if weight.numel() >= 4 and math.isfinite(factor) and factor > 0:
                    found[i] = factor
        if found:
            return _decayed_twice(case, window, found, "the loss has a term of the weights", step)
    return ""


def _decay_in_the_gradient(case: AuditedStep, window: Window) -> Outcome:
    decayed = case.decayed(window)
    for change in case.changes(window) if decayed else []:
        if math.isfinite(change.decay) and change.decay > 0:
            found = dict.fromkeys(decayed, change.decay)
            return _decayed_twice(case, window, found, "the gradient is changed by hand", change.after)
    return ""


def _decayed_twice(
    case: AuditedStep, window: Window, found: dict[int, float], cause: str, event: StepEvent
) -> Deviation:
    first = next(iter(found))
    decay = case.group_of(first, window.update)["weight_decay"]
    text = (
        f"the weights decay twice: {cause}, which adds {found[first]:.4g} times the weight to the gradient of "
        f"{case.listed(list(found))}, and the optimizer has weight_decay={decay:g}; keep one of them"
    )
    return Deviation(kind="decay-twice", text=text, place=event.place, tensors=case.tensors(list(found)))


def _dropped(case: AuditedStep, window: Window) -> Outcome:
    """Report parameters that the loss depends on, but that never get a gradient."""
    used = [e.after.grads for e in window.passes]
    without = [i for i in case.held if case.watched[i].requires_grad and all(is_zero(g[i]) for g in used)]
    without = [i for i in without if i in case.own and window.update.before.grads[i] is None]
    if not without or len(without) == len(case.held):
        return ""
    if case.losses_move is None:
        return f"{case.listed(without)} gets no gradient; whether the loss depends on it takes a step that runs again"
    if not case.losses_move(without):
        return ""
    text = (
        f"the loss depends on {case.listed(without)}, but no gradient reaches it: look for detach(), no_grad() or "
        "item() after it; if that is on purpose, leave it out of the optimizer"
    )
    return Deviation(
        kind="gradient-dropped", text=text, place=window.passes[0].place, ratio=0.0, tensors=case.tensors(without)
    )


def _ratio_with_old(case: AuditedStep, window: Window) -> float:
    """Return the norm of the gradient over the norm of this step's own gradient."""
    last = window.passes[-1]
    start = window.passes[0].before
    pairs = [(last.after.grads[i], start.grads[i]) for i in case.held]
    total = flat([a for a, _ in pairs if a is not None])
    own = flat([a - b if b is not None else a for a, b in pairs if a is not None])
    length = torch.linalg.vector_norm(own)
    return float(torch.linalg.vector_norm(total) / length) if length else math.nan


def _weights_moved(window: Window) -> bool:
    """Return whether the weights changed between the passes, as for sharpness-aware minimization."""
    first = window.passes[0].before.weights
    return any(w is not f for p in window.passes[1:] for w, f in zip(p.before.weights, first, strict=True))


def _columns(passes: Sequence[StepEvent]) -> list[tuple[LossCall, ...]]:
    """Return the calls at the same position of each pass, if each was differentiated once."""
    calls = [[c for c in p.losses if len(c.grads) == 1] for p in passes]
    if len({len(c) for c in calls}) != 1:
        return []
    return [c for c in zip(*calls, strict=True) if all(x.reduction == y.reduction for x in c for y in c)]


def _share(call: LossCall, step: StepEvent) -> float:
    """Return the factor of the mean in the differentiated value."""
    share = call.grads[0] / step.scale
    return share * call.count if call.reduction == "sum" and call.count > 1 else share


def _unscales(factor: float, passes: Sequence[StepEvent]) -> bool:
    return passes[0].scale != 1.0 and _is_near(factor * passes[0].scale, 1.0)


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * abs(b)
