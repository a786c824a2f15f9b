"""Call listeners after each backward pass of an Accelerator, while a training is watched."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import Tensor

from gradwatch.probe.call_listeners import CallListeners, Function


def _around(method: Function, listeners: CallListeners[Any]) -> Function:
    def backward(self: Accelerator, loss: Tensor, **kwargs: Any) -> Any:
        result = method(self, loss, **kwargs)
        for listener in listeners:
            listener.after_backward(self, loss)
        return result

    return backward


# a callback of a trainer is given neither the trainer nor its loss, and every loss passes through this method
BACKWARD_LISTENERS = CallListeners(Accelerator, "backward", _around)
