"""Find the modules, tensors and generators that a step reaches, widen them, and put their state back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from gradwatch.errors import is_users
from gradwatch.gradcheck.stepping.tensors import widened
from gradwatch.state.rng import random_state, set_random_state

PLAIN = (bool, int, float, str, type(None), Tensor)
"""Attributes of a module that are its state between two calls."""
MAX_DEPTH = 3
"""Calls of functions to follow in search of what a step uses."""


def reachable(*roots: Any) -> Iterator[Any]:
    """Yield the modules, tensors and generators that functions hold in closures, globals, defaults or as methods."""
    seen: set[int] = set()
    pending = [(root, 0) for root in roots]
    while pending:
        found, depth = pending.pop()
        if id(found) in seen or depth > MAX_DEPTH:
            continue
        seen.add(id(found))
        if isinstance(found, (nn.Module, Tensor, torch.Generator)):
            yield found
        elif isinstance(found, functools.partial):
            pending += [(x, depth) for x in (found.func, *found.args, *found.keywords.values())]
        elif isinstance(found, (list, tuple)) and len(found) < 100:
            pending += [(x, depth + 1) for x in found]
        elif isinstance(found, dict) and len(found) < 100:
            pending += [(x, depth + 1) for x in found.values()]
        elif inspect.ismethod(found):
            pending += [(found.__self__, depth), (found.__func__, depth)]
        elif inspect.isfunction(found) and is_users(found.__code__.co_filename):
            pending += [(x, depth + 1) for x in _held(found)]


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
            pending += [x for x in _held(function) if inspect.isfunction(x) or inspect.ismethod(x)]
    return found


def _held(function: Any) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    used = [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
    used = [x for x in used if isinstance(x, (nn.Module, Tensor, torch.Generator)) or inspect.isfunction(x)]
    return [*cells, *used, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True


@final
class Surroundings:
    """Hold everything outside of the batch that a step may change, and put it back.

    Args:
        model: Model of the step, or None.
        functions: Functions of the step.
    """

    def __init__(self, model: nn.Module | None, *functions: Any) -> None:
        found = list(reachable(*(() if model is None else (model,)), *functions))
        modules = [m for root in found if isinstance(root, nn.Module) for m in root.modules()]
        self.modules = list(dict.fromkeys(modules))
        self.parameters = list(dict.fromkeys(p for m in self.modules for p in m.parameters(recurse=False)))
        inside = [m.__dict__.values() for m in self.modules]
        loose = [t for t in found if isinstance(t, Tensor)]
        loose += [v for values in inside for v in values if isinstance(v, Tensor)]
        buffers = [b for m in self.modules for b in m.buffers(recurse=False)]
        unique = {id(t): t for t in (*buffers, *loose) if not t.requires_grad or t.is_leaf}
        for parameter in self.parameters:
            unique.pop(id(parameter), None)
        self.constants = list(unique.values())
        self.generators = [g for g in found if isinstance(g, torch.Generator)]
        self.generators += [v for values in inside for v in values if isinstance(v, torch.Generator)]
        self._original = [(t, t.data, t.grad) for t in (*self.parameters, *self.constants)]
        self._first_attributes = self._attributes()
        self._random = random_state()
        self.remember()
        self._first_values, self._first_states = self._values, self._states

    def widen(self, dtype: torch.dtype) -> None:
        """Convert parameters, buffers and constants in place."""
        for tensor, data, _ in self._original:
            tensor.grad = None
            tensor.data = widened(data, dtype)  # integers too: the original memory stays untouched
        self.remember()
        self._first_values, self._first_states = self._values, self._states

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter, buffer and constant with its values before it was converted."""
        yield from ((tensor, data) for tensor, data, _ in self._original)

    def remember(self) -> None:
        """Save the state that `reset` restores: buffers, constants, attributes and generators."""
        self._values = [(t, t.data, t.detach().clone()) for t in self.constants]
        self._plain = self._attributes()
        self._states = [(g, g.get_state()) for g in self.generators]

    def forget(self) -> None:
        """Make the state before the first step the one that `reset` restores."""
        for tensor, data, value in self._first_values:
            tensor.data = data
            tensor.data.copy_(value)
        self._values, self._plain, self._states = self._first_values, self._first_attributes, self._first_states

    def reset(self) -> None:
        """Restore the remembered state, all random generators, and no gradients."""
        for module, values in self._plain:
            for name in [n for n, v in module.__dict__.items() if isinstance(v, PLAIN) and n not in values]:
                del module.__dict__[name]
            module.__dict__.update(values)
        for tensor, data, value in self._values:
            tensor.data = data  # a step may have replaced the memory
            tensor.data.copy_(value)
        for generator, state in self._states:
            generator.set_state(state)
        for parameter in self.parameters:
            parameter.grad = None
        set_random_state(self._random)

    def restore(self) -> None:
        """Put everything back as it was at the start, bit for bit."""
        self.forget()
        self.reset()
        for tensor, data, grad in self._original:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad

    def _attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        return [(m, {k: v for k, v in m.__dict__.items() if isinstance(v, PLAIN)}) for m in self.modules]
