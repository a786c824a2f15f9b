"""Call listeners before each backward pass, while one of them is interested."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

Function = Callable[..., Any]


class BackwardListener(Protocol):
    """An object that reads the graph of a backward pass. Its method must not raise."""

    def before_backward(self, tensors: Any) -> None:
        """Read the graphs of the tensors from which a backward pass begins, whose saved values are still there."""
        ...


_listeners: list[weakref.ref[BackwardListener]] = []  # weak: a discarded monitor must not keep its model
_replaced: list[tuple[Function, Function]] = []
"""The function of torch and the one that calls the listeners, while there is a listener."""


def listen(listener: BackwardListener) -> None:
    """Call a listener before each backward pass until `forget`. Nothing is replaced while there is no listener."""
    _listeners.append(weakref.ref(listener, _listeners.remove))
    if not _replaced:
        # `Tensor.backward` calls it through its module, so this reaches every backward pass
        function = torch.autograd.backward
        replacement = _around(function)
        vars(torch.autograd)["backward"] = replacement
        _replaced.append((function, replacement))


def forget(listener: BackwardListener) -> None:
    """Undo `listen`. The last listener restores torch's function."""
    for reference in [*_listeners]:
        if reference() is listener:
            _listeners.remove(reference)
    if not _listeners:
        _restore()


def _restore() -> None:
    for function, replacement in _replaced:
        if torch.autograd.backward is replacement:  # otherwise other code has wrapped it, and a call finds no listener
            vars(torch.autograd)["backward"] = function
    _replaced.clear()


def _around(run: Function) -> Function:
    """Return a function that calls the listeners before torch's."""

    @functools.wraps(run)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not ("torch._dynamo" in sys.modules and torch.compiler.is_compiling()):
            for reference in [*_listeners]:
                if (listener := reference()) is not None:
                    listener.before_backward(tensors)
            if not _listeners:  # the last monitor was discarded without `close`
                _restore()
        return run(tensors, *args, **kwargs)

    return backward
