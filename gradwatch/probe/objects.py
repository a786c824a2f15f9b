"""Find the objects of a class among all objects of the process, or among those that the user's variables hold."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from gradwatch.probe.place import users_frames, variables_of

T = TypeVar("T")

MAX_DEPTH = 5
"""Maximum number of steps from a variable to an object: `agent.target.module` is two attributes, each in a dict."""

MAX_OBJECTS = 4096
"""Maximum number of objects to look at."""

MAX_ITEMS = 64
"""Maximum number of items of a container, and of attributes of an object, to look at."""

_LEAVES = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Tensor, np.ndarray, str, bytes, int, float)


def live(kind: type[T]) -> list[T]:
    """Return all objects of a class that the script holds, in no particular order; takes some 50 ms."""
    # `type` rather than `isinstance`, which asks proxies of other libraries for their class
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def reachable(kind: type[T]) -> list[T]:
    """Return the objects of a class that the variables of the user's functions in progress lead to; takes some ms."""
    seen: dict[int, Any] = {}
    found: list[T] = []
    level = [value for frame in users_frames() for value in variables_of(frame).values()]
    for _ in range(MAX_DEPTH):
        held: list[Any] = []
        for thing in level:
            if id(thing) in seen or issubclass(type(thing), _LEAVES) or len(seen) >= MAX_OBJECTS:
                continue
            seen[id(thing)] = thing  # kept, so that no other object gets its `id`
            if issubclass(type(thing), kind):
                found.append(thing)
            held += itertools.islice(_held_by(thing), MAX_ITEMS)
        level = held
    return found


def _held_by(thing: Any) -> Iterable[Any]:
    """Return what a container or an object holds, without running code of its class."""
    if type(thing) in (list, tuple, set, frozenset, deque):
        return tuple(thing)
    if type(thing) is dict:
        return tuple(thing.values())
    try:
        return tuple(object.__getattribute__(thing, "__dict__").values())
    except AttributeError:
        return ()
