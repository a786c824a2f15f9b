"""Notify listeners of the calls of a function, which is replaced while there is a listener."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, final

Function = Callable[..., Any]
Listener = TypeVar("Listener")


@final
class CallListeners(Generic[Listener]):
    """The listeners of one function. They are held weakly, so that a discarded one does not keep its model.

    Args:
        owner: Module or class of the function.
        name: Name of the function.
        around: Returns the function that is called in its place, given the original and these listeners.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[Function, CallListeners[Listener]], Function]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._references: list[weakref.ref[Any]] = []
        self._original: Function | None = None  # while it is replaced
        self._replacement: Function | None = None

    def __iter__(self) -> Iterator[Listener]:
        """Yield the listeners that are alive. Without any, the original function is restored."""
        for reference in [*self._references]:
            if (listener := reference()) is not None:
                yield listener
        if not self._references:
            self._restore()

    def add(self, listener: Listener) -> None:
        """Notify a listener of each call until `remove`."""
        self._references.append(weakref.ref(listener, self._references.remove))
        if self._original is None:
            self._original = getattr(self._owner, self._name)
            self._replacement = functools.wraps(self._original)(self._around(self._original, self))
            setattr(self._owner, self._name, self._replacement)

    def remove(self, listener: Listener) -> None:
        """Undo `add`. Removing the last listener restores the original function."""
        self._references[:] = [reference for reference in self._references if reference() is not listener]
        if not self._references:
            self._restore()

    def _restore(self) -> None:
        # otherwise other code has wrapped the replacement, and its calls find no listener
        if self._original is not None and getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
        self._original = self._replacement = None
