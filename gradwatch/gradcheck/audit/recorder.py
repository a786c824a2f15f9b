"""Record a live step by hooks and patches of torch, which are removed at the end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwatch.gradcheck.audit.events import InputMemory, StepEvent, TensorCopies
from gradwatch.gradcheck.audit.formulas import has_formula
from gradwatch.gradcheck.audit.losses import LossCalls
from gradwatch.gradcheck.stepping.engine import PLACES, is_inner_pass
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.place import calling_place
from gradwatch.replay.locate.call_site import ENGINE

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@final
class EventRecorder:
    """Records the events of a step.

    Args:
        watched: Parameters of the model and of the optimizer.
        models: Models whose inputs identify the micro-batches.
        spaces: Globals of the user's functions, which may hold torch's functions by name.
        caller: Function that calls the step; the user's statements run inside it.
        calls: Collects the losses if it is active already; by default, they are collected while recording.
    """

    def __init__(
        self,
        watched: Sequence[Tensor],
        *,
        models: Iterable[nn.Module],
        spaces: Iterable[dict[str, Any]],
        caller: CodeType,
        calls: LossCalls | None = None,
    ) -> None:
        self.watched = list(watched)
        self.index = {id(t): i for i, t in enumerate(self.watched)}
        self.events: list[StepEvent] = []
        self._models = list(models)
        self._spaces = list(spaces)
        self._caller = caller
        self._calls = calls or LossCalls()
        self._is_collecting = calls is not None
        self._parts: list[InputMemory] = []
        self._scales: list[float] = []
        self._open: dict[int, StepEvent] = {}
        self._depth = 0
        self._is_clipping = False
        self._weights: tuple[Tensor, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls made inside."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
            for model in self._models:
                stack.callback(model.register_forward_pre_hook(self._on_forward, with_kwargs=True).remove)
            for owner, name, around in self._patches():
                original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
                put = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
                stack.callback(put, name, original)
                put(name, functools.wraps(original)(around(original)))
            self._add("start", self.snapshot())
            if not self._is_collecting:
                stack.enter_context(self._calls)
            yield
            self._add("end", self.snapshot())

    def snapshot(self) -> TensorCopies:
        """Copy the gradients, and the weights that changed since the last time."""
        if not self._weights:
            self._weights = tuple(t.detach().clone() for t in self.watched)
        # by value: a write through `.data` leaves `_version` as it is
        pairs = zip(self._weights, self.watched, strict=True)
        self._weights = tuple(old if torch.equal(old, t.detach()) else t.detach().clone() for old, t in pairs)
        grads = (t.grad for t in self.watched)
        return TensorCopies(tuple(None if g is None else _dense(g) for g in grads), self._weights)

    def _patches(self) -> Iterator[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
        """Yield owner, name and wrapper of each function to replace."""
        for place in PLACES:
            yield place, ENGINE, self._around_backward
        around_zero = self._around("zero", lambda owner, *_, **__: {"owner": owner})
        yield Optimizer, "zero_grad", around_zero
        yield nn.Module, "zero_grad", around_zero
        yield torch.amp.GradScaler, "scale", self._around_scale
        yield torch.amp.GradScaler, "unscale_", self._around("unscale", self._unscaled)
        yield torch.amp.GradScaler, "step", self._around_scaler_step
        schedulers = [lr_scheduler.LRScheduler, *_subclasses(lr_scheduler.LRScheduler)]
        for scheduler in dict.fromkeys(schedulers):
            if "step" in vars(scheduler):
                yield scheduler, "step", self._around_schedule
        for name in CLIPS:
            original = getattr(nn.utils, name)
            spaces = {id(s): s for s in (vars(nn.utils), vars(nn.utils.clip_grad), *self._spaces)}
            for space in spaces.values():
                for known in [n for n, value in space.items() if value is original]:
                    yield space, known, self._around_clip

    def _add(self, kind: Any, before: TensorCopies, **fields: Any) -> StepEvent:
        event = StepEvent(kind=kind, before=before, after=before, place=calling_place(self._caller), **fields)
        self.events.append(event)
        return event

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(roots: Any, *args: Any, **options: Any) -> Any:
            if is_inner_pass() or not options.get("accumulate_grad", False):
                return run(roots, *args, **options)
            before = self.snapshot()
            nodes = [r.grad_fn for r in roots if isinstance(r, Tensor) and r.grad_fn is not None]
            terms: dict[int, list[Tensor]] = {}
            handles = list(self._watch_terms(nodes, terms))
            calls, self._calls.calls = self._calls.calls, []
            parts, self._parts = self._parts, []
            scale = self._scales.pop(0) if self._scales else 1.0
            loss = sum(to_float(r.detach().double().sum()) for r in roots if isinstance(r, Tensor)) / scale
            try:
                return run(roots, *args, **options)
            finally:
                for handle in handles:
                    handle.remove()
                event = self._add("backward", before, losses=calls, parts=parts, loss=loss, scale=scale, terms=terms)
                event.after = self.snapshot()
                self._calls.calls = []  # calls of a recomputation

        return backward

    def _watch_terms(self, roots: list[Any], terms: dict[int, list[Tensor]]) -> Iterator[Any]:
        """Hook the operations that give gradients directly to watched tensors."""
        seen: set[Any] = set()
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            inputs: dict[int, int] = {}
            for position, (inner, _) in enumerate(node.next_functions):
                if inner is None:
                    continue
                variable = getattr(inner, "variable", None)
                if variable is not None and id(variable) in self.index:
                    inputs[position] = self.index[id(variable)]
                pending.append(inner)
            if inputs:
                yield node.register_hook(functools.partial(_collect, inputs, terms))

    def _around(self, kind: Any, fields: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Any]], Any]:
        """Return a wrapper that records each call of a method, with fields made of the object and the arguments."""

        def around(run: Callable[..., Any]) -> Any:
            def call(owner: Any, *args: Any, **options: Any) -> Any:
                before = self.snapshot()
                result = run(owner, *args, **options)
                self._add(kind, before, **fields(owner, *args, **options)).after = self.snapshot()
                return result

            return call

        return around

    def _around_scale(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            if self._depth == 0:
                self._scales.append(scaler.get_scale())
            self._depth += 1  # for a list of losses, it calls itself
            try:
                return run(scaler, outputs)
            finally:
                self._depth -= 1

        return scale

    def _unscaled(self, scaler: Any, optimizer: Any) -> dict[str, Any]:
        return {"scale": scaler.get_scale(), "watched": self._indices(optimizer)}

    def _around_scaler_step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            count = sum(e.kind == "update" for e in self.events)
            result = run(scaler, optimizer, *args, **options)
            if sum(e.kind == "update" for e in self.events) == count:
                watched = self._indices(optimizer)
                self._add("no-update", self.snapshot(), scale=scaler.get_scale(), watched=watched, owner=optimizer)
            return result

        return step

    def _around_clip(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **options: Any) -> Any:
            if self._is_clipping:  # a function of torch that another one calls
                return run(parameters, *args, **options)
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            before = self.snapshot()
            self._is_clipping = True
            try:
                result = run(given, *args, **options)
            finally:
                self._is_clipping = False
            value = args[0] if args else options.get("max_norm", options.get("clip_value", 0.0))
            limit = {
                "limit": float(value),
                "empty": not any(p.grad is not None for p in given),
            }
            watched = tuple(self.index[id(p)] for p in given if id(p) in self.index)
            self._add("clip", before, limit=limit, watched=watched).after = self.snapshot()
            return result

        return clip

    def _around_schedule(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                return run(scheduler, *args, **options)
            finally:
                self._depth -= 1
                is_first = getattr(scheduler, "_step_count", 0) == 1  # the constructor makes this step
                if self._depth == 0 and not is_first:  # not one that another scheduler steps
                    self._add("schedule", self.snapshot(), owner=scheduler)

        return step

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        before, place = self.snapshot(), calling_place(self._caller)
        event = StepEvent(kind="update", before=before, after=before, place=place)
        event.owner, event.begin, event.watched = optimizer, len(self.events), self._indices(optimizer)
        event.groups = [dict(group) for group in optimizer.param_groups]
        event.state = {
            self.index[id(p)]: {k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in values.items()}
            for p, values in optimizer.state.items()
            if id(p) in self.index and has_formula(optimizer)  # other states may not be dense
        }
        event.limit = {
            name: float(value)
            for name in ("grad_scale", "found_inf")  # of a fused optimizer under a GradScaler
            if (value := getattr(optimizer, name, None)) is not None
        }
        self._open[id(optimizer)] = event

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        event = self._open.pop(id(optimizer))
        event.after = self.snapshot()
        self.events.append(event)

    def _on_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_inner_pass():
            return
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if first is not None and first.layout == torch.strided and first.numel():
            begin = int(first.storage_offset())
            extent = int(sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))) + 1
            self._parts.append(InputMemory(first.untyped_storage().data_ptr(), begin, begin + extent))

    def _indices(self, optimizer: Any) -> tuple[int, ...]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return tuple(self.index[id(p)] for p in params if id(p) in self.index)


def _collect(inputs: dict[int, int], terms: dict[int, list[Tensor]], grads: Any, _: Any) -> None:
    for position, index in inputs.items():
        if position < len(grads) and grads[position] is not None:
            terms.setdefault(index, []).append(_dense(grads[position]))


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad.clone() if grad.layout == torch.strided else grad.to_dense()


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    return [c for sub in kind.__subclasses__() for c in (sub, *_subclasses(sub))]
