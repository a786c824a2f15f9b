"""Describe the first bad operation of a step: the operation, the chain that leads to it, and the blame."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

from gradwatch.replay.locate.records import Operation, Place, Value


class Blame(StrEnum):
    """The thing that is at fault."""

    DATA = "bad data"
    WEIGHTS = "weights already NaN, Inf or huge"
    FORMAT = "number format too narrow"
    FORMULA = "numerically unstable operation"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The first bad operation of a step.

    Args:
        operation: The first operation whose output is not finite while its inputs are; where something was bad before
            the step began, the first that took it.
        forward: For one of the backward pass, the operation of the forward pass that it belongs to.
        leaf: What was bad before: a weight, a buffer or the data; None where nothing was.
        weight: The weight or buffer that is to blame, where one is: not finite, or out of hand.
        blame: What is at fault: data, weights, number format or formula.
        because: How that is known, with numbers; a sentence.
        is_jump: Whether all is finite, and the operation only one with a jump in magnitude.
        reaches: What it harms: `the loss`, or parameters whose gradients are not finite.
        chain: The operations that lead there, the input side first, the operation itself last.
        samples: Positions in the batch of the samples that make it happen; empty where it is no matter of samples, or
            where the batch was not given.
        in_data: The same samples by their indices in the training data, where that is known.
        followed: Operations that ran.
        runs: How many times the step was run to attribute the blame.
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
        """Name of the operation of the forward pass: itself, or the one whose backward pass it belongs to."""
        return (self.forward or self.operation).name

    @property
    def title(self) -> str:
        """What it is, in words."""
        operation = self.operation
        if operation.phase == "forward":
            return operation.name
        return f"the backward pass of {self.name} ({operation.name} in {operation.node})"

    @property
    def module(self) -> str:
        """Path of the module that called it; empty for the model itself, or outside of it."""
        return self.operation.module

    @property
    def place(self) -> Place | None:
        """The line that called it; of the backward pass, the line of the forward pass that made it."""
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
