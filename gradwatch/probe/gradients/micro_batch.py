"""Measure the gradient of the first micro-batch of a step, which shows how noisy gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.inert_hook import inert_hook


@final
class MicroBatchProbe:
    """Read the norm of the accumulated gradients after the first backward of a step, if it is due.

    When a backward reaches the hook of one parameter, the probe queues a callback at the end of that backward. Nothing
    is read with reentrant activation checkpointing, which runs a backward within the backward.

    Args:
        params: The parameters that one optimizer moves.

    Attributes:
        norm: Norm of the gradient of the first micro-batch, on the gradient's device; None if it was not due, or not
            measured. For distributed gradients, only the parts on this process count. The loop has divided the loss by
            the number of micro-batches, and may have scaled it.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.norm: Tensor | None = None
        self._params = params
        self._is_due = False

    def attach(self) -> list[RemovableHandle]:
        """Hook a parameter near the output, the likeliest to be reached, and return the hook."""
        leaves = [p for p in self._params if p.requires_grad and p.is_leaf]
        return [leaves[-1].register_hook(inert_hook(self._on_gradient))] if leaves else []

    def begin(self, *, is_due: bool) -> None:
        """Start a step.

        Args:
            is_due: Whether the norm is measured in this step.
        """
        self.norm = None
        self._is_due = is_due

    def _on_gradient(self, grad: Tensor) -> None:
        if self._is_due:
            self._is_due = False  # only the first backward of the step
            # at the end of the backward, since other gradients are not accumulated yet
            Variable._execution_engine.queue_callback(self._read)

    def _read(self) -> None:
        grads = [local_part(p.grad) for p in self._params if p.grad is not None and not p.grad.is_sparse]
        self.norm = nn.utils.get_total_norm(grads)
