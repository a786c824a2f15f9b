"""Watch a loop that moves its weights by hand, without an optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class HandUpdates:
    """The optimizer of a loop that moves its weights by hand. Its learning rate is unknown, which is nan.

    The loop may clear its gradients before it calls `Monitor.step`, so they are read at the end of each backward pass.
    """

    param_groups: list[dict[str, Any]]
    _is_queued = False

    def step(self, closure: Any = None) -> None:
        """Do nothing but call the hooks: the loop has moved the weights."""

    def after_backward(self, read: Callable[[], object]) -> list[RemovableHandle]:
        """Call a function at the end of each backward pass that reaches a parameter, and return the hooks."""

        def call() -> None:
            self._is_queued = False
            read()

        def queue(_: Tensor) -> None:
            if not self._is_queued:
                with contextlib.suppress(RuntimeError):  # a compiled backward may call hooks without the engine
                    Variable._execution_engine.queue_callback(call)
                    self._is_queued = True

        params = [p for group in self.param_groups for p in group["params"]]
        return [p.register_post_accumulate_grad_hook(queue) for p in params if p.is_leaf]


def hand_updates(models: Mapping[str, nn.Module]) -> list[Optimizer]:
    """Return the stand-in for the optimizers of a loop without any, unless no parameter is trainable."""
    params = dict.fromkeys(p for model in models.values() for p in model.parameters() if p.requires_grad)
    if not params:
        return []
    # a class on demand: libraries look optimizers up by name among the subclasses
    made = type(HandUpdates.__name__, (HandUpdates, Optimizer), {})
    return [made(list(params), {"lr": math.nan})]
