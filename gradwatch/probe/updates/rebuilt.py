"""Detect that a loop builds a new optimizer for each update, so that none keeps averages of earlier gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwatch.events import OPTIMIZER_REBUILT, Observation
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.records import LayerInfo

MIN_UPDATES = 20
"""Updates in a row that new optimizers must make: a stage of fine-tuning, or a task of meta-learning, has one each."""


@final
class RebuiltOptimizers:
    """Follow the optimizers that update the first watched weight, until one of them makes a second update.

    Only optimizers count that keep something between updates: SGD without momentum does not. Neither does L-BFGS, which
    may make all its iterations in one update.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        held = (param for param, layer in zip(params, layers, strict=True) if layer.group is not None)
        self._param = next((param for param in held if param.requires_grad), None)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._updates, self._name = 0, ""
        self._handles: list[RemovableHandle] = []
        if self._param is None:
            return
        # weak: a hook of all optimizers must not keep a monitor alive
        method = weakref.WeakMethod(self._before_update)

        def before_update(optimizer: Optimizer, *_: Any) -> None:
            if (call := method()) is not None:
                call(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(inert_hook(before_update)))

    def find(self, _step: int = 0, /) -> Iterator[Observation]:
        """Yield an observation, after a step, if each update so far was made by a new optimizer."""
        if self._handles and (self._param is None or self._updates >= MIN_UPDATES):
            self.close()
            if self._param is not None:
                yield OPTIMIZER_REBUILT.observe(values={"updates": self._updates}, optimizer=self._name)

    def close(self) -> None:
        """Remove the hook."""
        remove_hooks(self._handles)

    def _before_update(self, optimizer: Optimizer) -> None:
        if not any(param is self._param for group in optimizer.param_groups for param in group["params"]):
            return
        if optimizer in self._seen or not _keeps_averages(optimizer):
            self._param = None  # `find` removes the hook, since torch iterates over the hooks now
        self._seen.add(optimizer)
        self._updates, self._name = self._updates + 1, type(optimizer).__name__


def _keeps_averages(optimizer: Optimizer) -> bool:
    is_plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    return not is_plain and not isinstance(optimizer, LBFGS)
