"""Save everything that a step can reach and change, and put it back in place."""

from __future__ import annotations

import collections
import functools
import inspect
import random
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradwatch.errors import is_users
from gradwatch.state.rng import random_state, set_random_state

Undo = Callable[[], object]
MAX_ITEMS = 4096
"""Items of a container that are followed one by one; a longer one, such as a data set, is restored as a whole."""
STATEFUL = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


@final
class LiveState:
    """The state of all objects that some roots reach: tensors, containers, attributes, closures and generators.

    Args:
        roots: Functions, modules, optimizers and batches.
    """

    def __init__(self, *roots: Any) -> None:
        self._undo: list[Undo] = []
        self._random = random_state()
        self.functions: list[Any] = []
        seen: dict[int, Any] = {}  # the objects too: an `id` is unique only as long as its object lives
        pending = list(roots)
        while pending:
            found = pending.pop()
            if id(found) not in seen:
                seen[id(found)] = found
                pending += self._remember(found)
        self.found = list(seen.values())

    def restore(self) -> None:
        """Put everything back as it was, bit for bit."""
        for undo in self._undo:
            undo()
        set_random_state(self._random)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the objects of a class that were found."""
        return [x for x in self.found if issubclass(type(x), kind)]

    def _remember(self, found: Any) -> list[Any]:
        """Save an object, and return the objects that it leads to."""
        if isinstance(found, Tensor):
            self._undo.append(_tensor(found))
            return [] if found.grad_fn is not None or found.grad is None else [found.grad]
        if isinstance(found, torch.Generator):
            self._undo.append(functools.partial(found.set_state, found.get_state()))
            return []
        if isinstance(found, random.Random):
            self._undo.append(functools.partial(found.setstate, found.getstate()))
            return []
        if isinstance(found, np.random.Generator):
            bits = found.bit_generator
            self._undo.append(functools.partial(setattr, bits, "state", bits.state))
            return []
        if isinstance(found, dict):
            return self._container(found, list(found.items()), found.update, [*found, *found.values()])
        if isinstance(found, (list, collections.deque)):
            return self._container(found, list(found), found.extend, found)
        if isinstance(found, set):
            return self._container(found, list(found), found.update, found)
        if isinstance(found, (tuple, functools.partial)):
            return list(found) if isinstance(found, tuple) else [found.func, *found.args, found.keywords]
        if inspect.ismethod(found):
            return [found.__self__, found.__func__]
        if inspect.isfunction(found):
            return self._function(found)
        if isinstance(found, STATEFUL) or (hasattr(found, "__dict__") and is_of_user(type(found))):
            return [vars(found)]
        return []

    def _container(self, owner: Any, items: list[Any], fill: Callable[[Any], Any], inner: Any) -> list[Any]:
        def undo() -> None:
            owner.clear()
            fill(items)

        self._undo.append(undo)
        return list(inner) if len(items) <= MAX_ITEMS else []

    def _function(self, function: Any) -> list[Any]:
        """Save the closure and the globals that a function of the user's names, and follow them."""
        inner = inspect.unwrap(function)
        if not is_users(inner.__code__.co_filename):
            return [function.__wrapped__] if inner is not function else []
        self.functions.append(inner)
        found: list[Any] = [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
        for cell in inner.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
            found.append(value)
        for name in _names(inner.__code__):
            if name in inner.__globals__:
                value = inner.__globals__[name]
                self._undo.append(functools.partial(inner.__globals__.__setitem__, name, value))
                found.append(value)
        return found


def _names(code: Any) -> set[str]:
    """Return the global names of a function and of the functions that it defines."""
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names, inner))


def is_of_user(kind: type[Any]) -> bool:
    """Return whether a class is defined in a file of the user's."""
    try:
        return is_users(inspect.getfile(kind))
    except (TypeError, OSError):  # builtins, and classes of a notebook
        return kind.__module__ == "__main__"


def _tensor(tensor: Tensor) -> Undo:
    data, grad, requires_grad = tensor.data, tensor.grad if tensor.is_leaf else None, tensor.requires_grad
    value = data.clone()
    is_leaf = tensor.is_leaf

    def undo() -> None:
        if is_leaf:
            tensor.grad = None
        if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
            tensor.data = data
        if data.layout == torch.strided:
            tensor.data.copy_(value)
        if is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad

    return undo
