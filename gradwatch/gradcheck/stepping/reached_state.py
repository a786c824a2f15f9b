"""Save everything that a step can reach and change, and restore it in place."""

from __future__ import annotations

import collections
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradwatch.errors import is_users
from gradwatch.state.rng import random_state, set_random_state

MAX_ITEMS = 4096
"""Items of a container to follow one by one; a longer container, such as a data set, is restored as a whole."""
STATEFUL = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
CONTAINERS: tuple[type[Any], ...] = (collections.OrderedDict, dict, set, list, collections.deque)
"""Containers to refill by the methods of these classes: a subclass may refuse, as transformers' `ModelOutput` does."""


@final
class ReachedState:
    """The state of all objects that some roots reach: tensors, containers, attributes, closures and generators.

    Args:
        roots: Functions, modules, optimizers and batches.
        copies: Returns whether to copy the values of a tensor; if not, the caller must not write into its memory.

    Attributes:
        found: The objects.
        tensors: The tensors, with the memory that they had.
        functions: The user's functions among them.
    """

    def __init__(self, *roots: Any, copies: Callable[[Tensor], bool] = lambda _: True) -> None:
        self._copies = copies
        self._undo: list[Callable[[], object]] = []
        self._undo_hooks: list[Callable[[], object]] = []
        self._random = random_state()
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.functions: list[Any] = []
        seen: dict[int, Any] = {}  # the objects too: an `id` is unique only as long as its object lives
        pending = list(roots)
        while pending:
            found = pending.pop()
            if id(found) not in seen:
                seen[id(found)] = found
                pending += self._save(found)
        self.found = list(seen.values())

    def restore(self) -> None:
        """Restore everything, bit for bit."""
        for undo in self._undo_hooks:
            undo()
        self.rewind()

    def rewind(self) -> None:
        """Restore everything but the hooks of modules, for another run of the step."""
        for undo in reversed(self._undo):  # a gradient before its tensor, whose format it must have
            undo()
        set_random_state(self._random)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the objects of a class that were found."""
        return [x for x in self.found if issubclass(type(x), kind)]

    def modules(self) -> list[nn.Module]:
        """Return the modules that were found, each before its children."""
        return list(dict.fromkeys(m for root in self.of(nn.Module) for m in root.modules()))

    def _save(self, found: Any) -> list[Any]:
        """Save an object, and return the objects that it leads to."""
        if isinstance(found, Tensor):
            self._save_tensor(found)
            return [] if found.grad_fn is not None or found.grad is None else [found.grad]
        if isinstance(found, torch.Generator):
            self._undo.append(functools.partial(found.set_state, found.get_state()))
        elif isinstance(found, random.Random):
            self._undo.append(functools.partial(found.setstate, found.getstate()))
        elif isinstance(found, np.random.Generator):
            bits = found.bit_generator
            self._undo.append(functools.partial(setattr, bits, "state", bits.state))
        elif isinstance(found, CONTAINERS):
            return self._save_container(found, self._undo)
        elif isinstance(found, tuple):
            return list(found)
        elif isinstance(found, functools.partial):
            return [found.func, *found.args, found.keywords]
        elif inspect.ismethod(found):
            return [found.__self__, found.__func__]
        elif inspect.isfunction(found):
            return self._save_function(found)
        elif isinstance(found, nn.Module):
            return self._save_module(found)
        elif isinstance(found, STATEFUL) or (
            hasattr(found, "__dict__") and _is_class_of_user(type(found))  # type: ignore[arg-type]  # it is hashable
        ):
            return [vars(found)]
        return []

    def _save_tensor(self, tensor: Tensor) -> None:
        data, is_leaf, requires_grad = tensor.data, tensor.is_leaf, tensor.requires_grad
        grad = tensor.grad if is_leaf else None
        value = data.clone() if self._copies(tensor) else None
        self.tensors.append((tensor, data))

        def undo() -> None:
            if is_leaf:
                tensor.grad = None
            if _memory(tensor) != _memory(data):
                tensor.data = data
            if value is not None and data.layout == torch.strided:
                tensor.data.copy_(value)
            if is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad

        self._undo.append(undo)

    def _save_container(self, owner: Any, undos: list[Callable[[], object]]) -> list[Any]:
        base = next(kind for kind in CONTAINERS if isinstance(owner, kind))
        is_dict = isinstance(owner, dict)
        items = list(owner.items() if is_dict else owner)
        fill: Any = base.update if is_dict or base is set else base.extend

        def undo() -> None:
            base.clear(owner)
            fill(owner, items)

        undos.append(undo)
        if len(items) > MAX_ITEMS:
            return []
        return [x for pair in items for x in pair] if is_dict else items

    def _save_module(self, module: nn.Module) -> list[Any]:
        """Save the attributes of a module, and its hooks apart from them."""
        attributes = vars(module)
        hooks = [v for k, v in attributes.items() if k.endswith("hooks") and isinstance(v, dict)]
        self._save_container(attributes, self._undo)
        functions = [x for registered in hooks for x in self._save_container(registered, self._undo_hooks)]
        return [*functions, *(v for v in attributes.values() if not any(v is registered for registered in hooks))]

    def _save_function(self, function: Any) -> list[Any]:
        """Save the closure and the named globals of a user's function, and return the objects they lead to."""
        inner = inspect.unwrap(function)
        if not is_users(inner.__code__.co_filename):
            return [function.__wrapped__] if inner is not function else []
        self.functions.append(inner)
        for cell, value in _filled_cells(inner):
            self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
        for name, value in _named_globals(inner):
            self._undo.append(functools.partial(inner.__globals__.__setitem__, name, value))
        return _held_by(inner)


def called_functions(*functions: Any) -> list[Any]:
    """Return the user's functions that some functions reach by name or closure, themselves first."""
    found: list[Any] = []
    pending = [inspect.unwrap(getattr(f, "__func__", f)) for f in functions]
    while pending:
        function = pending.pop(0)
        if isinstance(function, functools.partial):
            pending.append(function.func)
        elif isinstance(function, nn.Module):
            pending.append(type(function).forward)
        elif inspect.isfunction(function) and function not in found and is_users(function.__code__.co_filename):
            found.append(function)
            pending += [x for x in _held_by(function) if inspect.isfunction(x) or inspect.ismethod(x)]
    return found


def _held_by(function: Any) -> list[Any]:
    """Return the objects in the closure, the named globals and the defaults of a function."""
    named = [value for _, value in (*_filled_cells(function), *_named_globals(function))]
    return [*named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _filled_cells(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the cells of a closure with their contents."""
    for cell in function.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _named_globals(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names, and that the functions inside it name."""
    spaces = function.__globals__
    yield from ((name, spaces[name]) for name in _names(function.__code__) if name in spaces)


def _names(code: Any) -> set[str]:
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _is_class_of_user(kind: type) -> bool:
    try:
        return is_users(inspect.getfile(kind))
    except (TypeError, OSError):  # builtins, and classes of a notebook
        return kind.__module__ == "__main__"


def _memory(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
