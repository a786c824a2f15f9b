"""Call listeners after each backward pass of an Accelerator, while a training is watched."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor

from gradwatch.probe.call_listeners import CallListeners, Function


class AcceleratorListener(Protocol):
    """An object that reads the loss of a backward pass. Its method must not raise."""

    def after_backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Read the loss and the gradients of a backward pass."""
        ...


def _around(method: Function, listeners: CallListeners[AcceleratorListener]) -> Function:
    def backward(self: Accelerator, loss: Tensor, **kwargs: Any) -> Any:
        result = method(self, loss, **kwargs)
        for listener in listeners:
            listener.after_backward(self, loss)
        return result

    return backward


# a callback of a trainer is given neither the trainer nor its loss, and every loss passes through this method
BACKWARD_LISTENERS = CallListeners(Accelerator, "backward", _around)
