"""Follow a loop that moves its weights by hand: a step ends when the weights have moved."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.autowatch.step_recorder import StepRecorder, total
from gradwatch.probe.inert_hook import inert_hook, remove_hooks

MAX_PARAMS, MAX_VALUES = 64, 16
"""Most parameters to compare, and values of each: one that has moved is enough."""


@final
class HandLoop:
    """Records a step when a pass begins with other weights than the last backward pass.

    Args:
        recorder: Records the steps.
        models: The models.
        params: The parameters that the loss depends on.

    Attributes:
        recorder: Records the steps.
        params: The `id` of each parameter.
        updated_at: Clock of the script at the last update.
    """

    def __init__(self, recorder: StepRecorder, models: Sequence[nn.Module], params: Sequence[Tensor]) -> None:
        self.recorder = recorder
        self.params = frozenset(map(id, params))
        self.updated_at = -1
        self._compared = [weakref.ref(param) for param in params[:MAX_PARAMS]]
        self._values: list[Tensor] = []
        self._pending: list[Tensor] = []
        hook = inert_hook(self._on_forward)
        # before the hook of the recorder, which keeps the inputs of the next step
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(hook, prepend=True) for model in models]

    def on_backward(self, loss: Tensor) -> None:
        """Record the last step if the weights have moved since, and keep the loss of the next."""
        self._record_if_moved()
        if not self._pending:
            self._values = self._read()
        self._pending.append(loss)
        self.recorder.begin_backward()

    def detach(self) -> None:
        """Record the last step if it is complete, and remove all hooks."""
        self._record_if_moved()
        self.recorder.detach()
        remove_hooks(self._handles)

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._record_if_moved()

    def _record_if_moved(self) -> None:
        if not self._pending:
            return
        now = self._read()
        if len(now) != len(self._values) or not all(map(torch.equal, now, self._values)):
            loss, self._pending = total(self._pending), []
            self.recorder.record(loss)

    def _read(self) -> list[Tensor]:
        params = [param for ref in self._compared if (param := ref()) is not None]
        return [param.detach().reshape(-1)[:MAX_VALUES].clone() for param in params]
