"""Follow the order of backward passes, clipping and updates through the first updates of each optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.events import CLEARED_EARLY, CLIPPED_LATE, GRADIENTS_REUSED, Observation
from gradwatch.probe.device.sync import Arrival, is_capturing
from gradwatch.probe.gradients import clip_calls
from gradwatch.probe.gradients.gradient_sample import last_write
from gradwatch.probe.gradients.hooked_params import drop_empty_hooks, end_params
from gradwatch.probe.inert_hook import inert_hook, remove_hooks

FIRST_UPDATES = 16
"""Number of first updates of each optimizer to follow."""

MAX_PASSES = 512
"""Maximum number of backward passes to follow, also if the optimizer makes no update."""

MIN_CLIPPED = 8
"""Updates whose gradients must be clipped afterwards, and none before: a loop may clip once to measure a norm."""

MIN_CLEARED = 8
"""Updates that must find the gradient gone: all but the first, which a backward pass may not have preceded."""

BY_VALUE = -1.0
"""Stands for the factor of a call that clips values, which has none."""


@final
class UpdateOrder:
    """Follow the first updates of each optimizer, by the last of its parameters.

    A gradient is to be made by a backward pass, then clipped, then used by one update, and then cleared. The version
    counter of the gradient and the calls of hooks show another order; no value of a gradient is read.

    Args:
        optimizers: The watched optimizers.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        ends = ((optimizer, end_params(optimizer)[1]) for optimizer in optimizers)
        self._orders = [_Order(optimizer, param) for optimizer, param in ends if param is not None]
        self._before_clip, self._after_clip = inert_hook(self._begin_clip), inert_hook(self._end_clip)
        if self._orders:
            clip_calls.listen(self)

    def before_clip(self, params: Sequence[Tensor]) -> None:
        """Record whether the gradients to be clipped were used by an update already."""
        self._before_clip(params)

    def after_clip(self, params: Sequence[Tensor], factor: float | Tensor | None) -> None:
        """Record the factor of the clipping."""
        self._after_clip(params, factor)

    def find(self, _step: int = 0, /) -> Iterator[Observation]:
        """Yield each wrong order of an optimizer, after a step, once its first updates are over."""
        for order in [order for order in self._orders if order.is_over]:
            order.close()
            self._orders.remove(order)
            yield from order.observations()
        if not self._orders:
            clip_calls.forget(self)

    def close(self) -> None:
        """Remove all hooks."""
        for order in self._orders:
            order.close()
        clip_calls.forget(self)

    def _begin_clip(self, params: Sequence[Tensor]) -> None:
        for order in self._of(params):
            order.before_clip()

    def _end_clip(self, params: Sequence[Tensor], factor: float | Tensor | None) -> None:
        for order in self._of(params):
            order.after_clip(factor)

    def _of(self, params: Sequence[Tensor]) -> list[_Order]:
        clipped = set(map(id, params))
        return [order for order in self._orders if not order.is_over and id(order.param) in clipped]


@final
class _Order:
    """What happens to the gradient of one parameter between the updates of its optimizer.

    Args:
        optimizer: The optimizer.
        param: One of its parameters, a leaf that requires a gradient.
    """

    def __init__(self, optimizer: Optimizer, param: Tensor) -> None:
        self.param = param
        self._updates, self._passes, self._all_passes = 0, 0, 0
        self._used: tuple[int, int] | None = None  # the last write to the gradient that the newest update used
        self._is_late = False  # whether the call of clipping in progress comes after that update
        self._clipped: tuple[int, int] | None = None  # the last write to a gradient that was clipped late
        self._factors: list[float | Tensor] = []  # of late calls whose gradient was then cleared
        self._factor: float | Tensor = BY_VALUE
        self._early, self._reused, self._cleared = 0, 0, 0
        self._handles: list[RemovableHandle] = [
            param.register_hook(inert_hook(self._before_backward)),
            # none after the update: a hook of the loop may call the monitor then, and torch iterates over them
            optimizer.register_step_pre_hook(inert_hook(self._before_update)),
        ]

    @property
    def is_over(self) -> bool:
        """Return whether enough was followed."""
        return self._updates >= FIRST_UPDATES or self._all_passes >= MAX_PASSES or self._is_cleared

    @property
    def _is_cleared(self) -> bool:
        return self._cleared >= max(MIN_CLEARED, self._updates - 1)

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)
        drop_empty_hooks(self.param)

    def before_clip(self) -> None:
        grad = self.param.grad
        self._is_late = not self._passes and self._used is not None and _mark(grad) == self._used
        self._early += self._passes > 0

    def after_clip(self, factor: float | Tensor | None) -> None:
        if self._is_late and not is_capturing([self.param]):
            self._clipped, self._factor = _mark(self.param.grad), BY_VALUE if factor is None else factor
        self._is_late = False

    def observations(self) -> Iterator[Observation]:
        """Yield the orders that the first updates have shown to be wrong."""
        if len(self._factors) >= MIN_CLIPPED and not self._early:
            arrived = Arrival([torch.as_tensor(factor) for factor in self._factors]).values()
            factors = [float(value) for value in arrived]
            yield CLIPPED_LATE.observe(values={"updates": len(factors), "factor": min(factors)})
        if self._reused:
            yield GRADIENTS_REUSED.observe(values={"reused": self._reused, "updates": self._updates})
        if self._is_cleared:
            yield CLEARED_EARLY.observe(values={"updates": self._cleared})

    def _before_backward(self, grad: Tensor) -> None:
        """Judge a late clipping: it has had no effect if its gradient is gone, or was written to."""
        if not self._passes and self._clipped is not None and _mark(self.param.grad) != self._clipped:
            self._factors.append(self._factor)
        self._clipped = None
        self._passes += 1
        self._all_passes += 1

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        mark = None
        if closure is None:  # a closure makes the gradient during the update
            mark = _mark(self.param.grad)
            self._cleared += mark is None and self._passes > 0
            self._reused += mark is not None and mark == self._used and not self._passes
        self._updates += 1
        self._passes, self._used, self._clipped = 0, mark, None


def _mark(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else last_write(grad)
