"""Measure the relative error of every operation of a step, forward and backward, as it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwatch.gradcheck.precision.shadows import Shadows, is_measured
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.graph.dispatched import changed_arguments
from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.replay.locate.op_tracer import UNWRITTEN
from gradwatch.replay.locate.operation_log import OperationLog
from gradwatch.replay.locate.records import Operation

FILLING = ("fill", "fill_", "full", "full_like", "masked_fill", "masked_fill_", "new_full", "scalar_tensor", "where")
"""Operations that write a user's number into a tensor, such as the lowest number of a format for a mask."""
MAX_ZERO_FRAC = 1e-11
"""Size of a result, relative to the largest argument, at which it is 0 but for the rounding of float64."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """One operation, with its effect on the digits.

    Args:
        operation: Its name, line and module.
        dtype: Format of its result.
        given: Largest relative error of its arguments.
        error: Relative error of its result; infinite if it is not finite and should be.
        top: Largest magnitude of the exact result.
        grows: Whether that is larger than every argument.
        is_zero: Whether the exact result is 0 by cancellation, so that it has no digits to lose.
    """

    operation: Operation
    dtype: torch.dtype
    given: float
    error: float
    top: float
    grows: bool
    is_zero: bool


@final
class PrecisionTracer(TorchDispatchMode):
    """Run every operation a second time on float64 twins, and measure the distance of the results.

    Args:
        modules: Provides the names of modules; entered by the caller.
        within: Code of the frame that runs the step.

    Attributes:
        measured: Operations with a floating-point result, in order.
        shadows: The twins.
        log: All operations.
        unfollowed: Names of operations that have no float64.
    """

    def __init__(self, modules: ModuleStack, *, within: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.measured: list[Measured] = []
        self.shadows = Shadows()
        self.log = OperationLog(modules, within=within)
        self.unfollowed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and its twin."""
        kwargs = kwargs or {}
        operation = self.log.begin(func)
        self.log.operations.append(operation)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # before the call, which may overwrite its arguments
        twin_args, twin_kwargs = self.shadows.arguments(tuple(args)), self.shadows.arguments(dict(kwargs))
        twins = [twin for t in given if is_measured(t) and (twin := self.shadows.twin(t)) is not None]
        before = max((twin.error for twin in twins), default=0.0)
        largest = max((twin.top for twin in twins), default=0.0)
        out = func(*args, **kwargs)
        if not self.shadows.run(func, twin_args, twin_kwargs, out):
            self.unfollowed.add(operation.name)
        if operation.name in UNWRITTEN:
            return out
        changed = changed_arguments(func, args, kwargs)
        known = {id(twin) for twin in twins}
        for tensor in {id(t): t for t in (*tree_leaves(out), *changed) if is_measured(t)}.values():
            twin = self.shadows.twin(tensor)
            is_written = any(tensor is c for c in changed)
            if twin is None or (id(twin) in known and not is_written):  # a view computes nothing
                continue
            found = self._measure(operation, tensor, before, largest)
            twin.error, twin.top = found.error, found.top
            self.measured.append(found)
        return out

    def _measure(self, operation: Operation, tensor: Tensor, before: float, largest: float) -> Measured:
        error, size, top, _, _ = compared(tensor, self.shadows.of(tensor))
        rms = size / math.sqrt(tensor.numel())
        return Measured(
            operation=operation,
            dtype=tensor.dtype,
            given=before,
            error=error,
            top=top,
            grows=operation.name not in FILLING and top > largest,
            is_zero=error > 0 and rms <= MAX_ZERO_FRAC * largest and math.isfinite(error),
        )


def compared(tensor: Tensor, twin: Tensor) -> tuple[float, float, float, int, int]:
    """Return relative error, norm and largest magnitude of the exact values, and the numbers of flushed and all values.

    Args:
        tensor: Values of any floating-point format.
        twin: Exact values, of the same shape.
    """
    numbers = _compared(tensor, twin)
    if not all(map(math.isfinite, numbers[:3])):
        finite = torch.isfinite(twin)  # the infinities of a mask are exact
        lost = to_host((~torch.isfinite(tensor) & finite).sum())
        numbers = _compared(torch.where(finite, tensor, 0), torch.where(finite, twin, 0))
        if lost:
            return math.inf, numbers[1], numbers[2], int(numbers[3]), int(numbers[4])
    difference, size, top, flushed, elements = numbers
    if not size:  # exactly 0: any difference has an infinite relative error, but the values are finite
        return (sys.float_info.max if difference else 0.0), size, top, int(flushed), int(elements)
    return difference / size, size, top, int(flushed), int(elements)


def _compared(tensor: Tensor, twin: Tensor) -> list[float]:
    difference = torch.linalg.vector_norm(tensor.to(twin.dtype) - twin)
    is_there = twin != 0
    flushed = ((tensor == 0) & is_there).sum()
    parts = [difference, torch.linalg.vector_norm(twin), twin.abs().max(), flushed, is_there.sum()]
    return [float(v) for v in to_host(torch.stack([p.double() for p in parts]))]
