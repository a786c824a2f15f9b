"""Keep the operations of one line away from their singular points, to test whether they make a step fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradwatch.probe.place import Place
from gradwatch.replay.locate.call_site import find_call_site

EPS = 1e-6
"""Distance from the singular point: above the resolution of float32 at 1, and small compared to usual values."""
LARGEST_EXPONENT = 80.0  # exp(88.7) is the largest float32

Guard = Callable[[Tensor], Tensor]


def _above_zero(x: Tensor) -> Tensor:
    return x.clamp_min(EPS)


def _off_zero(x: Tensor) -> Tensor:
    # not clamp_min, which would replace every negative operand
    return torch.where(x.abs() < EPS, torch.full_like(x, EPS), x)


def _inside_one(x: Tensor) -> Tensor:
    return x.clamp(EPS - 1, 1 - EPS)


FIRST: Mapping[str, Guard] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "pow", "__pow__"), _above_zero),
    **dict.fromkeys(("digamma", "lgamma", "reciprocal"), _off_zero),
    **dict.fromkeys(("acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "erfinv"), _inside_one),
    "log1p": lambda x: x.clamp_min(EPS - 1),
    **dict.fromkeys(("exp", "expm1", "cosh", "sinh"), lambda x: x.clamp_max(LARGEST_EXPONENT)),
}
"""Guards of the first operand, by the name of the function that the line calls."""
DIVISORS = ("div", "divide", "true_divide", "__truediv__", "__div__")  # the divisor is the second operand
REVERSED = ("__rtruediv__", "__rdiv__")  # the divisor is the first operand


@final
class NumericGuard(TorchFunctionMode):
    """Keeps operands of one line away from points without a finite result or derivative, while the mode is active.

    Args:
        place: The line.

    Attributes:
        guarded: Names of the operations with a guarded operand.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self.guarded: set[str] = set()

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operation with guarded operands."""
        name = getattr(func, "__name__", "")
        operand = 1 if name in DIVISORS else 0
        guard = _off_zero if name in (*DIVISORS, *REVERSED) else FIRST.get(name)
        # the line last: walking the frames is the slowest of these tests
        if guard and len(args) > operand and isinstance(args[operand], Tensor) and self._is_here():
            self.guarded.add(name)
            args = [guard(a) if i == operand and a.is_floating_point() else a for i, a in enumerate(args)]
        return func(*args, **(kwargs or {}))

    def _is_here(self) -> bool:
        place, _ = find_call_site(None, skip=3)  # its frame, this one and the torch function
        return place == self._place
