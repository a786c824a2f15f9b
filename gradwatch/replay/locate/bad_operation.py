"""Describe the first bad operation of a step: the operation, the chain of operations before it, and the cause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

from gradwatch.replay.locate.records import Operation, Place, Value


class Blame(StrEnum):
    """Name the cause of a non-finite value."""

    DATA = "bad data"
    WEIGHTS = "weights already NaN, Inf or huge"
    FORMAT = "number format too narrow"
    FORMULA = "numerically unstable operation"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Hold the first bad operation of a step.

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
        followed: Number of operations that ran.
        runs: Number of times the step was run to find the cause.
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
    def place(self) -> Place | None:
        """Line that called the operation; for the backward pass, the line of its forward operation."""
        return self.operation.place

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
    place = operation.place
    return {
        "name": operation.name,
        "phase": operation.phase,
        "node": operation.node,
        "module": operation.module,
        "module_type": operation.module_type,
        "file": place.file if place else None,
        "line": place.line if place else None,
        "text": place.text if place else None,
        "inputs": [v.to_json() for v in operation.inputs],
        "outputs": [v.to_json() for v in operation.outputs],
    }
