"""Find the origin of a value that is not finite, back from the loss or a gradient, past intended infinities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from gradwatch.replay.locate.records import Operation, Value

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mkldnn_convolution")
"""Operations that no mask is meant for, but as what is added."""
FACTORS = ("mul", "div")
"""Operations that no mask from outside of the step is meant for; one that was made in it may be scaled."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NanOrigin:
    """Where it began.

    Args:
        operation: The first operation with an output that is not finite.
        leaf: What it was given that was not finite before the step began, or None where its inputs were finite.
    """

    operation: Operation
    leaf: Value | None = None


def is_on_purpose(operation: Operation, before: Sequence[Operation], scalars: Iterable[float]) -> bool:
    """Return whether infinities are intended: an argument is infinite, or only intended ones came in."""
    if not operation.is_bad or operation.has_nan:
        return False
    bad = [v for v in operation.inputs if v.bad]
    if bad:
        return not _to_blame(operation, before)
    return any(math.isinf(s) for s in scalars)


def find_origin(operations: Sequence[Operation], sinks: Iterable[Value]) -> NanOrigin | None:
    """Return the first place where what is not finite in the sinks began, or None where all of them are finite.

    Args:
        operations: In the order in which they ran.
        sinks: The loss, or gradients of parameters.
    """
    starts = list(_starts(operations, sinks))
    return min(starts, key=lambda s: s.operation.index, default=None)


def upstream(operations: Sequence[Operation], last: Operation) -> list[Operation]:
    """Return the operations that lead from the input to one, the input side first, views and casts left out.

    Of several inputs, the one that was computed is followed, and of those the one of largest magnitude.
    """
    path = [last]
    while made := [v for v in path[-1].inputs if v.source is not None and v.source < path[-1].index]:
        largest = max(made, key=lambda v: (v.bad > 0, v.magnitude))
        assert largest.source is not None, "filtered above"
        path.append(operations[largest.source])
    return path[::-1]


def jumps(operations: Sequence[Operation], factor: float) -> Iterator[Operation]:
    """Yield the operations whose largest magnitude is more than `factor` times that of all their inputs, and of 1."""
    for operation in operations:
        given = max((v.magnitude for v in operation.inputs), default=math.inf)
        got = max((v.magnitude for v in operation.outputs), default=0.0)
        if operation.inputs and got > factor * max(given, 1.0):
            yield operation


def _starts(operations: Sequence[Operation], sinks: Iterable[Value]) -> Iterator[NanOrigin]:
    todo = [v.source for v in sinks if v.bad and v.source is not None]
    seen = set(todo)
    while todo:
        operation = operations[todo.pop()]
        harmful = _harmful(operation, operations)
        if not any(v.bad for v in operation.inputs):
            yield NanOrigin(operation=operation)
        elif not harmful:
            yield NanOrigin(operation=operation if operation.has_nan else _unmasked(operation, operations))
        for value in harmful:
            if value.source is None:
                yield NanOrigin(operation=operation, leaf=value)
            elif value.source not in seen:
                seen.add(value.source)
                todo.append(value.source)


def _harmful(operation: Operation, operations: Sequence[Operation]) -> list[Value]:
    """Return the inputs to follow: of a NaN those with NaN, where there are such, else infinities."""
    nans = [v for v in operation.inputs if v.nans] if operation.has_nan else []
    return nans or _to_blame(operation, operations)


def _to_blame(operation: Operation, operations: Sequence[Operation]) -> list[Value]:
    """Return the inputs that are not finite, and not so on purpose."""
    added = operation.name in ("addmm", "baddbmm")  # their first input is added to the product of the others
    found = []
    for i, value in enumerate(operation.inputs):
        is_factor = operation.name in PRODUCTS and not (added and i == 0)
        is_factor |= operation.name in FACTORS and value.origin in ("input", "buffer")
        if value.bad and (is_factor or not _is_mask(value, operations)):
            found.append(value)
    return found


def _is_mask(value: Value, operations: Sequence[Operation]) -> bool:
    """Return whether a value may be intended not to be finite."""
    if value.source is not None:
        return operations[value.source].on_purpose
    if value.nans or value.origin == "parameter":
        return False
    return value.origin == "constant" or value.negative_only  # a mask that is kept as a buffer, or given with the batch


def _unmasked(operation: Operation, operations: Sequence[Operation]) -> Operation:
    """Return where an infinity that was meant for a mask was picked up: the first that gathers or adds up."""
    path = [operation]
    while made := [v for v in path[-1].inputs if v.bad and v.source is not None]:
        assert made[0].source is not None, "filtered above"
        path.append(operations[made[0].source])
    for step in reversed(path):
        given = max((v.size for v in step.inputs if v.bad), default=0)
        if given > max((v.size for v in step.outputs), default=0):
            return step
    return operation
