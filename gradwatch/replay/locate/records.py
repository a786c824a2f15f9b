"""Records of traced operations: values with their ranges, the line and the module that called them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

Phase = Literal["forward", "backward"]
Origin = Literal["parameter", "buffer", "input", "constant"]
HALVES = ("float16", "bfloat16")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of source.

    Args:
        file: Path as Python knows it.
        line: Number, from 1.
        text: What stands there, without indentation; empty where the source is not at hand.
        function: Name of the function around it.
    """

    file: str
    line: int
    text: str
    function: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that went into an operation, or came out of it.

    Args:
        shape: Its shape.
        dtype: Its dtype, such as `float32`.
        low: Smallest finite value; nan where there is none, or where the dtype is not floating.
        high: Largest finite value, likewise.
        bad: Values that are not finite.
        nans: How many of those are NaN.
        negative_only: Whether all that is not finite is -inf, as in a mask.
        source: Index of the operation that wrote it, or None where it was there before.
        name: What it is called where it was there before: a parameter, buffer or input.
        origin: What it was before, or None where an operation wrote it.
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
        """Number of values."""
        return math.prod(self.shape)

    @property
    def magnitude(self) -> float:
        """Largest finite magnitude; 0 where there is none."""
        known = [abs(v) for v in (self.low, self.high) if v == v]
        return max(known, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; what is unknown is None."""
        low, high = (None if v != v else v for v in (self.low, self.high))
        told = {"shape": list(self.shape), "dtype": self.dtype, "low": low, "high": high}
        return told | {"nonfinite": self.bad, "nan": self.nans, "name": self.name}


@final
@dataclass(slots=True, kw_only=True)
class Operation:
    """One operation as it ran.

    Args:
        index: Its number, in the order in which operations ran.
        name: Torch's name of it, such as `log` or `softmax`.
        phase: Whether it ran in the forward pass (or in one that is repeated) or in the backward pass.
        module: Path of the module whose forward called it; empty for the outermost, and outside of all modules.
        module_type: Class name of that module; empty outside of all modules.
        place: Line that called it, or None where no line of anybody but torch and gradwatch did.
        node: For the backward pass: name of the node of the graph, such as `SqrtBackward0`.
        forward: For the backward pass: index of the operation that made the node, or None where that is not known.
        inputs: Tensors that went in, as they were before it.
        outputs: Tensors that came out of it, or were changed by it.
        on_purpose: Whether its infinities are intended, such as the infinities of a mask.
        leaf: For an addition to a parameter's gradient: the name of the parameter.
    """

    index: int
    name: str
    phase: Phase
    module: str = ""
    module_type: str = ""
    place: Place | None = None
    node: str = ""
    forward: int | None = None
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    on_purpose: bool = False
    leaf: str = ""

    @property
    def has_nan(self) -> bool:
        """Whether a NaN came out."""
        return any(v.nans for v in self.outputs)

    @property
    def is_bad(self) -> bool:
        """Whether something came out that is not finite."""
        return any(v.bad for v in self.outputs)

    @property
    def is_half(self) -> bool:
        """Whether it computed in a half format."""
        return any(v.dtype in HALVES for v in (*self.inputs, *self.outputs))
