"""Detect changes of weights or optimizer state between two steps, such as a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.events import RANK_OPTIMIZER_LOADED, RANK_WEIGHTS_CHANGED
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.device.sync import is_on_host, to_float
from gradwatch.probe.inert_hook import Removable, inert_hook
from gradwatch.records import Event

MAX_EVENTS = 8
"""Maximum number of changes that are emitted: a loop may bound its weights after each step."""


@final
class ChangeWatch:
    """Compares the weights at the end of an update with the weights before the next one.

    One value of each parameter is read, so that the comparison takes some microseconds. On a GPU, or if the parameters
    have several formats, the number of changes in place is read instead, which waits for no device.

    Args:
        optimizer: The optimizer of the parameters.
        emit: Called with each event.
    """

    def __init__(self, optimizer: Optimizer, emit: Callable[[Event], None]) -> None:
        self._optimizer, self._emit = optimizer, emit
        params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        self._params = [p for p in params if p.layout == torch.strided and not is_distributed(p)]
        self._first: list[Tensor] = []
        if all(is_on_host(p) and p.dtype == self._params[0].dtype for p in self._params):
            # views, which follow the weights; as arrays of NumPy they would keep the loop from resizing its storages
            self._first = [p.detach()[(0,) * p.ndim] for p in self._params]
        self._after: Tensor | None = None
        self._num_events = 0
        self.step = 0

    def attach(self, step: int) -> Sequence[Removable]:
        """Hook the optimizer, and return what removes the hooks."""
        self.step = step
        return [
            self._optimizer.register_step_post_hook(inert_hook(self._end)),
            self._optimizer.register_load_state_dict_post_hook(inert_hook(self._load)),
        ]

    def compare(self) -> None:
        """Emit an event if the weights have changed since the end of the last update. Call it before an update."""
        before, self._after = self._after, None
        if before is None or torch.equal(before, now := self._values()):
            return
        is_changed = (before != now) & ~(before.isnan() & now.isnan())
        if num_changed := int(to_float(is_changed.sum())):
            self._num_events += 1
            self._emit(RANK_WEIGHTS_CHANGED.emit(step=self.step, values={"parameters": num_changed}))

    def _values(self) -> Tensor:
        if self._first:
            return torch.stack(self._first)
        return torch.tensor([p._version for p in self._params], device="cpu")

    def _end(self, *_: Any) -> None:
        self._after = self._values() if self._num_events < MAX_EVENTS else None

    def _load(self, *_: Any) -> None:
        self._emit(RANK_OPTIMIZER_LOADED.emit(step=self.step))
