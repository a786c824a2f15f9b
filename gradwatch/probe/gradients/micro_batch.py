"""The gradient of a step's first micro-batch alone: with that of the whole step it tells how noisy gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle


@final
class MicroBatchProbe:
    """Reads the norm of the accumulated gradients after the first backward of a step, where it is due.

    A hook of one parameter sees when a backward reaches it with its gradient cleared; the engine then calls back at the
    end of that backward. (Where checkpointing runs a backward within the backward, that is too early: nothing is read
    with `use_reentrant=True`, whose gradients come in parts.)

    Args:
        params: The parameters that one optimizer moves.

    Attributes:
        norm: Norm of the gradient of the first micro-batch, on its device; None if it was not due, or not seen. A loop
            divides each loss by the number of micro-batches, and the loss may be scaled.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.norm: Tensor | None = None
        self._params = params
        self._is_due = False

    def attach(self) -> list[RemovableHandle]:
        """Hook a parameter near the output, the likeliest to be reached, and return the hook."""
        leaves = [p for p in self._params if p.requires_grad and p.is_leaf]
        return [leaves[-1].register_hook(self._on_gradient)] if leaves else []

    def begin(self, *, is_due: bool) -> None:
        """Start a step.

        Args:
            is_due: Whether the norm is measured in this step.
        """
        self.norm = None
        self._is_due = is_due

    def _on_gradient(self, grad: Tensor) -> None:
        if self._is_due:
            self._is_due = False
            Variable._execution_engine.queue_callback(self._read)

    def _read(self) -> None:
        grads = [p.grad for p in self._params if p.grad is not None and not p.grad.is_sparse]
        self.norm = nn.utils.get_total_norm(grads)
