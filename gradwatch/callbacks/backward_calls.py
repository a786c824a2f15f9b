"""Call listeners after each backward pass of an Accelerator, while a training is watched."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor

Method = Callable[..., Any]


class BackwardListener(Protocol):
    """An object that reads the loss of a backward pass. Its method must not raise."""

    def after_backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Read the loss and the gradients of a backward pass."""
        ...


_listeners: list[weakref.ref[BackwardListener]] = []  # weak: a discarded callback must not keep its model
_replaced: list[tuple[Method, Method]] = []
"""The method of Accelerate and the one that calls the listeners, while there is a listener."""


def listen(listener: BackwardListener) -> None:
    """Call a listener after each `Accelerator.backward` until `forget`.

    A callback of a trainer is given neither the trainer nor its loss, and every loss passes through this method.
    """
    _listeners.append(weakref.ref(listener, _listeners.remove))
    if not _replaced:
        method = Accelerator.backward
        replacement = _around(method)
        Accelerator.backward = replacement
        _replaced.append((method, replacement))


def forget(listener: BackwardListener) -> None:
    """Undo `listen`. The last listener restores the method."""
    for reference in [*_listeners]:
        if reference() is listener:
            _listeners.remove(reference)
    if _listeners:
        return
    for method, replacement in _replaced:
        if Accelerator.backward is replacement:  # otherwise other code has wrapped it, and a call finds no listener
            Accelerator.backward = method
    _replaced.clear()


def _around(method: Method) -> Method:
    """Return a method that calls the listeners after Accelerate's."""

    @functools.wraps(method)
    def backward(self: Accelerator, loss: Tensor, **kwargs: Any) -> Any:
        result = method(self, loss, **kwargs)
        for reference in [*_listeners]:
            if (listener := reference()) is not None:
                listener.after_backward(self, loss)
        return result

    return backward
