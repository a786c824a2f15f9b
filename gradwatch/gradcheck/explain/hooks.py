"""Run a step without gradient hooks: on parameters, on modules, and registered in a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from gradwatch.errors import is_users
from gradwatch.gradcheck.source import source_of
from gradwatch.probe.place import NOWHERE, Place, calling_place


@final
@dataclass(frozen=True, slots=True)
class GradientHook:
    """A hook that gets a gradient.

    Args:
        function: The hook.
        owner: Name of the parameter or module it is registered on, or an empty string.
        registered: The line that registered it, if a forward did.
    """

    function: Any
    owner: str
    registered: Place

    @property
    def place(self) -> Place:
        """Return the line that returns the changed gradient, or the line of the registration."""
        source = source_of(self.function)
        returns = source.returned()
        return source.place(returns[-1][0] if returns else source.node) or self.registered

    @property
    def name(self) -> str:
        """Return the name of the hook's function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def key(self) -> int:
        """Return the identity of the code: a lambda in a forward is a new object each time."""
        return id(getattr(self.function, "__code__", self.function))


@contextmanager
def without_hooks(
    modules: Collection[nn.Module], names: Mapping[int, str], *, only: int | None = None
) -> Iterator[list[GradientHook]]:
    """Remove gradient hooks inside the context, and yield the removed ones.

    Args:
        modules: Modules with their parameters.
        names: Names of parameters and modules by identity.
        only: Key of the only hook to remove, or None for all.
    """
    removed: list[GradientHook] = []
    undo: list[tuple[Any, dict[Any, Any]]] = []

    def take(hooks: Any, owner: str) -> None:
        if not hooks:
            return
        undo.append((hooks, dict(hooks)))
        for key, function in list(hooks.items()):
            hook = GradientHook(function, owner, NOWHERE)
            if only is None or hook.key == only:
                removed.append(hook)
                del hooks[key]

    for module in modules:
        owner = names.get(id(module), type(module).__name__)
        for attribute in ("_backward_hooks", "_backward_pre_hooks"):
            take(getattr(module, attribute, None), owner)
        for parameter in module.parameters(recurse=False):
            own = names.get(id(parameter), "")
            take(parameter._backward_hooks, own)
            take(getattr(parameter, "_post_accumulate_grad_hooks", None), own)
    register: Any = torch.Tensor.register_hook

    def registered(tensor: Tensor, function: Any) -> Any:
        hook = GradientHook(function, "", calling_place())
        code = getattr(function, "__code__", None)
        of_torch = code is not None and not is_users(code.co_filename)  # torch's full backward hooks register these
        if of_torch or (only is not None and hook.key != only):
            return register(tensor, function)
        removed.append(hook)
        return register(tensor, lambda grad: None)

    torch.Tensor.register_hook = registered  # type: ignore[method-assign]  # put back below
    try:
        yield removed
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]  # the original
        for hooks, before in undo:
            hooks.clear()
            hooks.update(before)
