"""Divide the events of a step into one window per update, and follow the passes that make up each gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.gradcheck.audit.events import InputMemory, StepEvent, TensorCopies
from gradwatch.probe.device.sync import to_float

OLD = -1
"""Origin of a gradient that was there before the step."""


@final
@dataclass(slots=True)
class Window:
    """An update with the events that led to it.

    Args:
        update: The update.
        events: Events since the update before it, or since the start.
        passes: Backward passes among them that gave gradients to the optimizer's parameters.
        used: Passes whose gradients are in the update.
        has_old: Whether gradients from before are in the update.
    """

    update: StepEvent
    events: list[StepEvent]
    passes: list[StepEvent] = field(default_factory=list)
    used: list[StepEvent] = field(default_factory=list)
    has_old: bool = False

    @property
    def has_closure(self) -> bool:
        """Return whether the optimizer ran backward passes itself."""
        inside = {id(e) for e in self.events[max(0, self.update.begin) :]}
        return any(id(e) in inside for e in self.passes)


def windows(events: Sequence[StepEvent], held: Sequence[int]) -> list[Window]:
    """Return the windows of the updates of some watched tensors.

    Args:
        events: Events of a step.
        held: Indices of the tensors that the optimizer holds.
    """
    updates = innermost_updates(events, held)
    found: list[Window] = []
    current: list[StepEvent] = []
    passes: list[int] = []
    origins: dict[int, set[int]] = {i: {OLD} for i in held if not is_zero(events[0].after.grads[i])}
    begun = 0
    for position, event in enumerate(events):
        if event.kind not in ("update", "start"):
            _by_hand(events[position - 1].after, event.before, origins)
        if event.kind == "backward":
            gave = [i for i in held if _differ(event.before.grads[i], event.after.grads[i])]
            for i in gave:
                origins.setdefault(i, set()).add(position)
            passes += [position] if gave else []
        elif event.kind == "zero":
            _by_hand(event.before, event.after, origins)
        if not any(event is u for u in updates):
            current.append(event)
            continue
        used = sorted(set().union(*origins.values()) if origins else set())
        inside = event.begin < position and any(p >= event.begin for p in passes)
        if not inside:
            _by_hand(events[position - 1].after, event.before, origins)
            used = sorted(set().union(*origins.values()) if origins else set())
        event.begin -= begun
        found.append(
            Window(
                update=event,
                events=current,
                passes=[events[p] for p in passes],
                used=[events[p] for p in used if p != OLD and p in passes],
                has_old=any(p not in passes for p in used),
            )
        )
        current, passes, begun = [], [], position + 1
    return found


def innermost_updates(events: Sequence[StepEvent], held: Sequence[int]) -> list[StepEvent]:
    """Return the updates of some tensors, without those that only wrap another one."""
    wanted = set(held)
    matching = [(i, e) for i, e in enumerate(events) if e.kind == "update" and wanted & set(e.watched)]
    return [e for i, e in matching if not any(e.begin <= j < i for j, _ in matching)]


def _by_hand(before: TensorCopies, after: TensorCopies, origins: dict[int, set[int]]) -> None:
    """Forget the passes of a gradient that was zeroed, and the old gradient if it was changed."""
    for i in list(origins):
        if is_zero(after.grads[i]) or (origins[i] == {OLD} and _differ(before.grads[i], after.grads[i])):
            del origins[i]


def micro_batches(passes: Sequence[StepEvent], batch: Any) -> bool:
    """Return whether backward passes certainly belong to the parts of one batch.

    They are if the inputs of the model are slices of one tensor that do not overlap, or different items of one list of
    micro-batches. Passes of several losses, or of real and generated samples, are not.
    """
    if len(passes) < 2 or any(not p.parts for p in passes):
        return False
    firsts = [p.parts[0] for p in passes]
    if len({p.storage for p in firsts}) == 1:
        return _are_disjoint(firsts)
    paths = dict(_paths(batch, ()))
    known = [paths.get((p.storage, p.begin)) for p in firsts]
    if None in known or len(set(known)) < len(known):
        return False
    return _are_items([k for k in known if k is not None], batch)


def _are_disjoint(parts: Sequence[InputMemory]) -> bool:
    ordered = sorted(parts, key=lambda p: p.begin)
    return all(a.end <= b.begin for a, b in itertools.pairwise(ordered))


def _are_items(paths: list[tuple[Any, ...]], batch: Any) -> bool:
    """Return whether paths differ in one position only: the number of a micro-batch."""
    if len({len(p) for p in paths}) > 1 or len(paths[0]) < 2:
        return False
    differing = [i for i, keys in enumerate(zip(*paths, strict=True)) if len(set(keys)) > 1]
    if len(differing) != 1 or not all(isinstance(p[differing[0]], int) for p in paths):
        return False
    if differing[0] < len(paths[0]) - 1:
        return True
    container = batch
    for key in paths[0][:-1]:
        container = container[key]
    return isinstance(container, list)  # a tuple of tensors is one sample's parts


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[int, int], tuple[Any, ...]]]:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield (value.untyped_storage().data_ptr(), int(value.storage_offset())), path
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _paths(item, (*path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))


def is_zero(grad: Tensor | None) -> bool:
    """Return whether there is no gradient, or only zeros."""
    return grad is None or to_float(grad.abs().sum()) == 0.0


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return not (is_zero(a) and is_zero(b))
    return not torch.equal(a, b)
