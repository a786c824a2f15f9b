"""Call listeners before each backward pass, while one of them is interested."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from gradwatch.probe.call_listeners import CallListeners, Function


class BackwardListener(Protocol):
    """An object that reads the graph of a backward pass. Its method must not raise."""

    def before_backward(self, tensors: Any) -> None:
        """Read the graphs of the tensors from which a backward pass begins, whose saved values are still there."""
        ...


def _around(run: Function, listeners: CallListeners[BackwardListener]) -> Function:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not ("torch._dynamo" in sys.modules and torch.compiler.is_compiling()):
            for listener in listeners:
                listener.before_backward(tensors)
        return run(tensors, *args, **kwargs)

    return backward


# `Tensor.backward` calls the function through its module, so this reaches every backward pass
BACKWARD_LISTENERS = CallListeners(torch.autograd, "backward", _around)
