"""Make hooks that do nothing in a copy of their model or optimizer, and remove hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle


@final
class InertHook:
    """Call a function as a hook. A copy of the hook, made or saved with its module or optimizer, does nothing.

    Args:
        callback: Called with the arguments of the hook; None in a copy.
    """

    def __init__(self, callback: Callable[..., Any] | None = None) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> Any:
        return None if self._callback is None else self._callback(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # copying and pickling use this, so a copy has neither the callback nor its probe
        return InertHook, ()


def inert_hook(callback: Callable[..., Any]) -> InertHook:
    """Return a hook that calls a function; copies of the hook do nothing."""
    return InertHook(callback)


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and clear the list of their handles."""
    for handle in handles:
        handle.remove()
    handles.clear()


def untraced(hook: InertHook) -> Callable[..., Any]:
    """Return a hook that torch.compile does not trace."""
    # only if torch.compile is in use: importing it takes a second
    excluded: Callable[..., Any] = torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
    return excluded
