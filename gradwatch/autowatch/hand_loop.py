"""Follow a loop that moves its weights by hand: a step ends when the weights have moved."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gradwatch.autowatch.step_recorder import StepRecorder, total

MAX_PARAMS, MAX_VALUES = 64, 16
"""Maximum number of parameters to compare, and of values of each: one that has moved is enough."""


@final
class HandLoop:
    """Records a step when gradients are cleared, or a backward pass begins, with other weights than the last pass.

    Args:
        recorder: Records the steps.
        params: The parameters that the loss depends on.

    Attributes:
        recorder: Records the steps.
        params: The `id` of each parameter.
        updated_at: Clock of the script at the last update.
    """

    def __init__(self, recorder: StepRecorder, params: Sequence[Tensor]) -> None:
        self.recorder = recorder
        self.params = frozenset(map(id, params))
        self.updated_at = -1
        self._compared = [weakref.ref(param) for param in params[:MAX_PARAMS]]
        self._values: list[Tensor] = []
        self._pending: list[Tensor] = []

    def on_backward(self, loss: Tensor, *, is_scaled: bool) -> None:
        """Record the last step if the weights have moved since, and keep the loss of the next."""
        self.record_if_moved()
        if not self._pending:
            self._values = self._read()
        self._pending.append(loss)
        self.recorder.begin_backward()

    def detach(self) -> None:
        """Record the last step if it is complete, and remove all hooks."""
        self.record_if_moved()
        self.recorder.detach()

    def record_if_moved(self) -> None:
        """Record the last step if the weights have moved since its backward pass."""
        if not self._pending:
            return
        now = self._read()
        if len(now) != len(self._values) or not all(map(torch.equal, now, self._values)):
            loss, self._pending = total(self._pending), []
            self.recorder.record(loss)

    def _read(self) -> list[Tensor]:
        params = [param for ref in self._compared if (param := ref()) is not None]
        return [param.detach().reshape(-1)[:MAX_VALUES].clone() for param in params]
