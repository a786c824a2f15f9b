"""Trace a non-finite value from the loss or a gradient back to its origin, and skip intended infinities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from gradwatch.replay.locate.records import Operation, Value

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mkldnn_convolution")
"""Operations that never take a mask, except as the added term."""
FACTORS = ("mul", "div")
"""Operations that never take a mask from outside of the step. A mask that the step creates may be scaled."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NanOrigin:
    """The origin of a non-finite value.

    Args:
        operation: First operation with a non-finite output.
        leaf: Input of the operation that was not finite before the step began, or None if its inputs were finite.
    """

    operation: Operation
    leaf: Value | None = None


def is_on_purpose(operation: Operation, before: Sequence[Operation], scalars: Iterable[float]) -> bool:
    """Return whether infinities in the output are intended: from an infinite argument, or from intended inputs."""
    if not operation.is_bad or operation.has_nan:  # NaN is never intended
        return False
    bad = [v for v in operation.inputs if v.bad]
    if bad:
        return not _to_blame(operation, before)
    return any(math.isinf(s) for s in scalars)


def find_origin(operations: Sequence[Operation], sinks: Iterable[Value]) -> NanOrigin | None:
    """Return the first origin of the non-finite values in the sinks, or None if all sinks are finite.

    Args:
        operations: Operations in the order in which they ran.
        sinks: The loss, or gradients of parameters.
    """
    starts = list(_starts(operations, sinks))
    return min(starts, key=lambda s: s.operation.index, default=None)


def upstream(operations: Sequence[Operation], last: Operation) -> list[Operation]:
    """Return the chain of operations from the input to an operation, the input side first, without views and casts.

    If an operation has several computed inputs, the chain follows a non-finite input, or else the largest input.
    """
    path = [last]
    while made := [v for v in path[-1].inputs if v.source is not None and v.source < path[-1].index]:
        largest = max(made, key=lambda v: (v.bad > 0, v.magnitude))
        assert largest.source is not None, "filtered above"
        path.append(operations[largest.source])
    return path[::-1]


def jumps(operations: Sequence[Operation], factor: float) -> Iterator[Operation]:
    """Yield the operations with outputs more than `factor` times as large as all their inputs, and as 1."""
    # as 1 too: with inputs below 1, the output itself must exceed the factor
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
            # every bad input is intended: a NaN was made here, an infinity where the mask was gathered or summed
            yield NanOrigin(operation=operation if operation.has_nan else _unmasked(operation, operations))
        for value in harmful:
            if value.source is None:
                yield NanOrigin(operation=operation, leaf=value)
            elif value.source not in seen:
                seen.add(value.source)
                todo.append(value.source)


def _harmful(operation: Operation, operations: Sequence[Operation]) -> list[Value]:
    """Return the inputs to follow: for a NaN the inputs with NaN, if there are any, else the infinite inputs."""
    nans = [v for v in operation.inputs if v.nans] if operation.has_nan else []
    return nans or _to_blame(operation, operations)


def _to_blame(operation: Operation, operations: Sequence[Operation]) -> list[Value]:
    """Return the non-finite inputs that are not intended."""
    added = operation.name in ("addmm", "baddbmm")  # their first input is added to the product of the others
    found = []
    for i, value in enumerate(operation.inputs):
        is_factor = operation.name in PRODUCTS and not (added and i == 0)
        is_factor |= operation.name in FACTORS and value.origin in ("input", "buffer")
        if value.bad and (is_factor or not _is_mask(value, operations)):
            found.append(value)
    return found


def _is_mask(value: Value, operations: Sequence[Operation]) -> bool:
    """Return whether the infinities of a value may be intended, as in a mask."""
    if value.source is not None:
        return operations[value.source].on_purpose
    if value.nans or value.origin == "parameter":
        return False
    return value.origin == "constant" or value.negative_only  # a mask that is a buffer, or part of the batch


def _unmasked(operation: Operation, operations: Sequence[Operation]) -> Operation:
    """Return the first operation that gathers or sums the infinity of a mask, where it stops being a mask."""
    path = [operation]
    while made := [v for v in path[-1].inputs if v.bad and v.source is not None]:
        assert made[0].source is not None, "filtered above"
        path.append(operations[made[0].source])
    for step in reversed(path):
        given = max((v.size for v in step.inputs if v.bad), default=0)
        # a gather or a sum has a smaller output; an operation that keeps the size keeps the mask
        if given > max((v.size for v in step.outputs), default=0):
            return step
    return operation
