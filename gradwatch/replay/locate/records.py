"""Describe traced operations: values with their ranges, and the line and module that called them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.probe.place import NOWHERE, Place

Phase = Literal["forward", "backward"]
Origin = Literal["parameter", "buffer", "input", "constant"]
HALVES = ("float16", "bfloat16")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An input or output tensor of an operation.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, such as `float32`.
        low: Smallest finite value; nan if there is none, or if the dtype is not floating-point.
        high: Largest finite value; nan in the same cases.
        bad: Number of values that are not finite.
        nans: Number of NaN values.
        negative_only: Whether all non-finite values are -inf, as in a mask.
        source: Index of the operation that wrote the tensor, or None if it existed before the step.
        name: Name of a parameter, buffer or input that existed before the step, else empty.
        origin: Kind of tensor that existed before the step, or None if an operation wrote it.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    bad: int = 0
    nans: int = 0
    negative_only: bool = False
    source: int | None = None
    name: str = ""
    origin: Origin | None = None

    @property
    def size(self) -> int:
        """Number of values in the tensor."""
        return math.prod(self.shape)

    @property
    def magnitude(self) -> float:
        """Largest finite magnitude; 0 if there is no finite value."""
        known = [abs(v) for v in (self.low, self.high) if v == v]  # false for nan
        return max(known, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; unknown numbers are None."""
        # JSON has no NaN
        low, high = (None if v != v else v for v in (self.low, self.high))
        fields = {"shape": list(self.shape), "dtype": self.dtype, "low": low, "high": high}
        return fields | {"nonfinite": self.bad, "nan": self.nans, "name": self.name}


@final
@dataclass(slots=True, kw_only=True)
class Operation:
    """One executed operation.

    Args:
        index: Number of the operation, in the order in which operations ran.
        name: Name of the operation in torch, such as `log` or `softmax`.
        phase: `forward`, also for a recomputed forward pass, or `backward`.
        module: Path of the calling module; empty for the outermost module, and outside of all modules.
        module_type: Class name of the calling module; empty outside of all modules.
        place: Line that called the operation, which is unknown if only torch and gradwatch are on the call stack.
        node: For the backward pass: name of the autograd node, such as `SqrtBackward0`.
        forward: For the backward pass: index of the operation that created the node, or None if unknown.
        inputs: Input tensors, as they were before the operation.
        outputs: Tensors that the operation returned or changed.
        on_purpose: Whether its infinities are intended, such as the infinities of a mask.
        leaf: For an addition to a parameter's gradient: the name of the parameter.
    """

    index: int
    name: str
    phase: Phase
    module: str = ""
    module_type: str = ""
    place: Place = NOWHERE
    node: str = ""
    forward: int | None = None
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    on_purpose: bool = False
    leaf: str = ""

    @property
    def has_nan(self) -> bool:
        """Whether an output contains NaN."""
        return any(v.nans for v in self.outputs)

    @property
    def is_bad(self) -> bool:
        """Whether an output contains a value that is not finite."""
        return any(v.bad for v in self.outputs)

    @property
    def is_half(self) -> bool:
        """Whether an input or output is float16 or bfloat16."""
        return any(v.dtype in HALVES for v in (*self.inputs, *self.outputs))
