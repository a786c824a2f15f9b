"""The gradient of a step's first micro-batch alone: with that of the whole step it tells how noisy gradients are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.device.sync import to_float


@final
class MicroBatchProbe:
    """Reads the norm of the accumulated gradients after the first backward of a step, where it is due.

    A hook of one parameter sees when a backward reaches it with its gradient cleared; the engine then calls back at the
    end of that backward. (Where checkpointing runs a backward within the backward, that is too early: nothing is read
    with `use_reentrant=True`, whose gradients come in parts.)

    Args:
        params: The parameters that one optimizer moves.
        accumulate: Micro-batches per step.
        is_late: Whether to leave what is read on the device.

    Attributes:
        norm: Norm of the gradient of the first micro-batch, times `accumulate`: a loop divides each loss by that many.
            nan where it was not due, or not seen.
        late: The same still scaled, on its device, where the host does not wait for it; or None.
    """

    def __init__(self, params: Sequence[Tensor], accumulate: int, *, is_late: bool = False) -> None:
        self.norm = math.nan
        self.late: Tensor | None = None
        self._is_late = is_late
        self._params = params
        self._accumulate = accumulate
        self._is_due = False
        self._factor = 1.0

    def attach(self) -> list[RemovableHandle]:
        """Hook a parameter near the output, the likeliest to be reached, and return the hook."""
        leaves = [p for p in self._params if p.requires_grad and p.is_leaf]
        return [leaves[-1].register_hook(self._on_gradient)] if leaves else []

    def begin(self, *, is_due: bool, scale: float) -> None:
        """Make ready for a step whose loss is multiplied by a scale."""
        self.norm, self.late = math.nan, None
        self._is_due = is_due
        self._factor = self._accumulate / scale

    def _on_gradient(self, grad: Tensor) -> None:
        if self._is_due:
            self._is_due = False
            Variable._execution_engine.queue_callback(self._read)

    def _read(self) -> None:
        grads = [p.grad for p in self._params if p.grad is not None and not p.grad.is_sparse]
        norm = nn.utils.get_total_norm(grads)
        if self._is_late:
            self.late = self._accumulate * norm
        else:
            self.norm = self._factor * to_float(norm)
