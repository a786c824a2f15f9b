"""Run a backward with other tensors instead of the saved ones, to find one that makes the gradient right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from gradwatch.gradcheck.explain.nodes import writable
from gradwatch.gradcheck.explain.wording import Named
from gradwatch.gradcheck.source import calls, source_of
from gradwatch.gradcheck.stepping.function_calls import RecordedCall, method, tensors_of
from gradwatch.gradcheck.stepping.tensors import copied
from gradwatch.probe.place import NOWHERE, Place

MAX_TRIES = 64


@final
class _Context:
    """A context with saved tensors of our choice, and the attributes of a real one."""

    def __init__(self, real: Any, saved: Sequence[Any], attributes: dict[str, Any], needs: tuple[bool, ...]) -> None:
        self.__dict__.update(attributes)
        self.saved_tensors = tuple(saved)
        self.needs_input_grad = needs
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def substitution(
    call: RecordedCall, is_right: Callable[[Sequence[Tensor | None]], bool], modules: Sequence[nn.Module]
) -> Named | None:
    """Return the mistake of a saved tensor whose replacement by an argument or a result makes the gradients right.

    It is `stale` if a buffer of a module was saved, else `wrong_saved`, at the line that saved it.

    Args:
        call: The call.
        is_right: Judges the gradients of the arguments.
        modules: Modules of the step, whose buffers may have been saved.
    """
    ctx = call.ctx
    saved, attributes = _saved(call)
    if saved is None:
        return None
    slots: list[tuple[str | int, Tensor]] = [(i, t) for i, t in enumerate(saved) if isinstance(t, Tensor)]
    slots += [(name, value) for name, value in attributes.items() if isinstance(value, Tensor)]
    candidates = [*tensors_of(call.args), *tensors_of(call.outputs)]
    backward, tries = method(call.function, "backward"), 0
    for slot, old in slots:
        for new in [*candidates, *_statistics(candidates, old)]:
            if new.shape != old.shape or torch.equal(new, old):
                continue
            tries += 1
            if tries > MAX_TRIES:
                return None
            changed = [new if i == slot else t for i, t in enumerate(saved)]
            context = _Context(
                ctx, changed, {**attributes, **({slot: new} if isinstance(slot, str) else {})}, call.needs
            )
            if is_right(_gradients(call, backward, context)):
                buffers = [b for m in modules for b in m.buffers(recurse=False)]
                is_stale = any(b.shape == old.shape and torch.equal(b.to(old), old) for b in buffers if b.numel() > 1)
                return Named("stale" if is_stale else "wrong_saved", _saving_line(call, slot))
    return None


def _statistics(candidates: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return statistics of the candidates that a buffer may stand for: mean and variance over the other dimensions."""
    found = []
    for value in candidates:
        if value.ndim > 1 and like.ndim == 1 and not value.is_complex():
            for dimension in range(value.ndim):
                if value.shape[dimension] == like.shape[0]:
                    rest = [d for d in range(value.ndim) if d != dimension]
                    found += [value.mean(rest), value.var(rest, unbiased=False), value.var(rest)]
    return found


def _saved(call: RecordedCall) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the tensors that a new application saves, and the attributes of its context."""
    kept: list[Any] = []
    args = [a.requires_grad_() if n else a for a, n in zip(copied(call.args), call.needs, strict=True)]
    try:
        with torch.enable_grad():
            result = call.function.apply(*map(writable, args))
        first = next(t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, Tensor))
        node = first.grad_fn
        kept = [t.detach() if isinstance(t, Tensor) else t for t in node.saved_tensors]  # type: ignore[union-attr]
        return kept, dict(vars(node))
    except (RuntimeError, StopIteration, AttributeError, TypeError):
        return None, {}


def _gradients(call: RecordedCall, backward: Any, context: _Context) -> list[Tensor | None]:
    try:
        with torch.no_grad():
            result = backward(context, *copied(call.grad_outputs))
    except Exception:  # another tensor may have the wrong shape
        return [None] * len(call.args)
    grads = list(result) if isinstance(result, (tuple, list)) else [result]
    grads += [None] * (len(call.args) - len(grads))
    return [
        g if not isinstance(g, Tensor) or not isinstance(a, Tensor) or g.shape == a.shape else None
        for g, a in zip(grads, call.args, strict=False)
    ]


def _saving_line(call: RecordedCall, slot: str | int) -> Place:
    for name in ("setup_context", "forward"):
        source = source_of(method(call.function, name))
        found = source.simple(lambda s: calls(s, ("save_for_backward",)) if isinstance(slot, int) else _sets(s, slot))
        if found:
            return source.place(found[-1])
    return NOWHERE


def _sets(statement: Any, attribute: str) -> bool:
    return any(getattr(t, "attr", None) == attribute for t in getattr(statement, "targets", ()))
