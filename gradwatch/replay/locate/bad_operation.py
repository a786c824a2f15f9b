"""Describe the first bad operation of a step: the operation, the chain of operations before it, and the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

from gradwatch.probe.place import Place
from gradwatch.render.common import format as units
from gradwatch.replay.locate.records import Operation, Value

LABEL = 10
"""Columns of a label in the text."""
MAX_NAMES, MAX_SAMPLES, MAX_LINKS = 4, 12, 6
"""Maximum numbers of gradients, samples and operations of a path that the text lists."""


class Blame(StrEnum):
    """The cause of a non-finite value."""

    DATA = "bad data"
    WEIGHTS = "weights already NaN, Inf or huge"
    FORMAT = "number format too narrow"
    FORMULA = "numerically unstable operation"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The first bad operation of a step.

    Args:
        operation: First operation with finite inputs and a non-finite output. If a value was bad before the step
            began, the first operation that used this value.
        forward: For an operation of the backward pass, the operation of the forward pass that it belongs to.
        leaf: Value that was bad before the step: a weight, a buffer or the data; None if there was none.
        weight: Weight or buffer that is the cause, since it is not finite or too large; None for other causes.
        blame: Cause: data, weights, number format or formula.
        because: Evidence for the cause, with numbers, as a sentence.
        is_jump: Whether all values are finite, and the operation is only a jump in magnitude.
        reaches: Affected results: `the loss`, or the parameters with non-finite gradients.
        chain: Operations that lead to the bad operation, the input side first, the operation itself last.
        samples: Positions in the batch of the samples that trigger it. Empty if no single samples do, or if the batch
            was not given.
        in_data: Indices of these samples in the training data, if known.
        followed: Number of operations that were traced.
        runs: Number of times that the step was run to find the cause.
    """

    operation: Operation
    forward: Operation | None
    leaf: Value | None = None
    weight: Value | None = None
    blame: Blame = Blame.FORMULA
    because: str = ""
    is_jump: bool = False
    reaches: tuple[str, ...] = ()
    chain: tuple[Operation, ...]
    samples: tuple[int, ...] = ()
    in_data: tuple[int, ...] = ()
    followed: int
    runs: int = 1

    @property
    def name(self) -> str:
        """Name of the operation, or for the backward pass, of the forward operation that it belongs to."""
        return (self.forward or self.operation).name

    @property
    def title(self) -> str:
        """Description of the operation in words."""
        operation = self.operation
        if operation.phase == "forward":
            return operation.name
        return f"the backward pass of {self.name} ({operation.name} in {operation.node})"

    @property
    def module(self) -> str:
        """Path of the module that called the operation; empty for the model itself, and outside of the model."""
        return self.operation.module

    @property
    def place(self) -> Place:
        """Line that called the operation; for the backward pass, the line of its forward operation."""
        return self.operation.place

    @property
    def verdict(self) -> str:
        """The beginning of a sentence that ends with `title`."""
        return f"the first {'jump in magnitude' if self.is_jump else 'bad operation'} is"

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict} {self.title}", *(f"{label:>{LABEL}} {text}" for label, text in self.rows())])

    def rows(self, *, since: int | None = None, brief: bool = False) -> Iterator[tuple[str, str]]:
        """Yield labels and texts about the operation: its place, inputs, outputs and cause, and the path to it.

        Args:
            since: Step whose update made the weight bad, or None.
            brief: Whether to omit values and path.
        """
        operation = self.operation
        yield "module", _module(operation)
        if place := operation.place:
            yield "line", f"{place}, in {place.function}"
            yield "", place.text
        if not brief:
            yield from (("in", _value(value)) for value in operation.inputs)
            yield from (("out", _value(value)) for value in operation.outputs if value.size)
        bad_since = "" if since is None else f"; since the update at step {since:,}"
        yield "cause", f"{self.blame}: {self.because}{bad_since}"
        if self.samples and (not brief or self.blame is Blame.DATA):
            yield "samples", _few([str(i) for i in self.samples], MAX_SAMPLES) + " of the batch"
            if self.in_data:
                yield "", _few([f"{i:,}" for i in self.in_data], MAX_SAMPLES) + " of the training data"
        if brief:
            return
        if self.reaches:
            gradients = self.reaches != ("the loss",)
            yield "reaches", ("the gradient of " if gradients else "") + _few(self.reaches, MAX_NAMES)
        yield "path", _path(self.chain)
        yield "", f"traced {units.plural(self.followed, 'operation')} in {units.plural(self.runs, 'run')} of the step"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "verdict": str(self.blame),
            "because": self.because,
            "operation": _operation(self.operation),
            "belongs_to": _operation(self.forward) if self.forward else None,
            "was_bad_before": self.leaf.to_json() if self.leaf else None,
            "is_jump": self.is_jump,
            "reaches": list(self.reaches),
            "chain": [_operation(o) for o in self.chain],
            "samples": list(self.samples),
            "samples_in_data": list(self.in_data),
            "followed": self.followed,
            "runs": self.runs,
        }


def _operation(operation: Operation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "phase": operation.phase,
        "node": operation.node,
        "module": operation.module,
        "module_type": operation.module_type,
        **operation.place.to_json(),
        "text": operation.place.text or None,
        "inputs": [v.to_json() for v in operation.inputs],
        "outputs": [v.to_json() for v in operation.outputs],
    }


def _module(operation: Operation) -> str:
    if not operation.module_type:
        return "in no module"
    return f"{operation.module or 'the model itself'} ({operation.module_type})"


def _value(value: Value) -> str:
    text = f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}"
    if value.low == value.low:  # nan if no value is finite, or if the dtype is not floating
        low, high = units.number(value.low), units.number(value.high)
        text += f", {low}" if low == high else f", {low} to {high}"
    if value.bad:
        kinds = [f"{value.nans:,} NaN"] if value.nans else []
        infinity = "-Inf" if value.negative_only else "Inf"
        kinds += [f"{value.bad - value.nans:,} {infinity}"] if value.bad > value.nans else []
        text += f", {' and '.join(kinds)} of {value.size:,}"
    return text + (f"  {value.name}" if value.name else "")


def _path(chain: Sequence[Operation]) -> str:
    names = [f"{o.module}: {o.name}" if o.module else o.name for o in chain]
    # consecutive operations with equal labels add nothing
    names = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    if len(names) > MAX_LINKS + 1:  # the first one, and the last ones
        names = [names[0], f"({len(names) - MAX_LINKS - 1} more)", *names[-MAX_LINKS:]]
    return " > ".join(names)


def _few(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
