"""Make hooks that leave exports, transforms and copies alone, and remove hooks."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.errors import GradwatchError

# bound here, since some hooks run at every step
_is_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = torch._C._is_tracing
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

_do_nothing = contextlib.nullcontext.__exit__
"""Takes any arguments and returns None. A copy needs only the standard library to load it."""


@final
class InertHook:
    """Call a function as a hook, if tensors have values.

    The hook is skipped in a forward or backward pass that has no values to read: in `torch.jit.trace`, `torch.export`,
    a transform of `torch.func`, or with fake tensors. `torch.jit.script` does not see the hook. A copy of the hook,
    made or saved with its module or optimizer, does nothing, and loads without gradwatch.

    An error in the function never reaches the training: one RuntimeWarning names the first.

    Args:
        callback: Called with the arguments of the hook.
        is_compiled: Whether `torch.compile` traces the hook. If not, compiled code does not call it.
    """

    __torch_unserializable__ = True  # torch does not warn that a tensor loses this hook when it is saved

    def __init__(self, callback: Callable[..., Any], *, is_compiled: bool = False) -> None:
        self._callback = callback
        self._is_compiled, self._has_warned = is_compiled, False

    def __call__(self, *args: Any) -> Any:
        if _is_compiling():
            # torch.compile reports what it cannot trace
            return self._callback(*args) if self._is_compiled and not _is_exporting() else None
        if (
            _is_tracing()
            or _innermost_transform() is not None
            or (_num_dispatch_modes() and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
        ):
            return None
        try:
            return self._callback(*args)
        except GradwatchError:  # the user can fix its cause
            raise
        except Exception as error:  # of any kind: the training must not stop
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = f"a reading of a forward or backward pass is left out: {type(error).__name__}: {error}"
            warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)

    def __reduce__(self) -> tuple[Any, ...]:
        # copying and pickling use this, so a copy has neither the callback nor its probe
        return getattr, (contextlib.nullcontext(), "__exit__")


def inert_hook(callback: Callable[..., Any], *, is_compiled: bool = False) -> InertHook:
    """Return a hook that calls a function if tensors have values; copies of the hook do nothing."""
    return InertHook(callback, is_compiled=is_compiled)


def add_input_hook(module: nn.Module, callback: Callable[..., Any], *, is_compiled: bool = False) -> RemovableHandle:
    """Call a function before each forward pass, with the module, its arguments and its keyword arguments.

    Args:
        module: A module that takes hooks.
        callback: Called as an inert hook.
        is_compiled: Whether `torch.compile` traces the hook.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        # torch leaves the keyword arguments out if another hook has removed this one during the same call
        return None if kwargs is None else callback(module, args, kwargs)

    return module.register_forward_pre_hook(inert_hook(hook, is_compiled=is_compiled), with_kwargs=True)


class Removable(Protocol):
    """Something attached that can be removed, such as a `RemovableHandle` of torch."""

    def remove(self) -> None:
        """Detach it. A second call does nothing."""
        ...


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and clear the list of their handles."""
    for handle in handles:
        handle.remove()
    handles.clear()


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile does not trace."""
    # only if torch.compile is in use: importing it takes a second
    excluded: Callable[..., Any] = torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
    return excluded


def takes_hooks(module: nn.Module) -> bool:
    """Return whether a module takes hooks: modules of TorchScript do not, and a class may refuse them."""
    if isinstance(module, torch.jit.ScriptModule):  # a traced model would take them, but its parts do not
        return False
    try:
        module.register_forward_pre_hook(_nothing).remove()
    except Exception:  # of any kind: the gradients are watched in any case
        return False
    return True


@contextlib.contextmanager
def _hidden(module: nn.Module) -> Iterator[None]:
    """Remove all inert hooks, and copies of them, from the tables of a module and its parts during the context."""
    tables = [table for part in module.modules() for table in (part._forward_hooks, part._forward_pre_hooks)]
    before = [(table, dict(table)) for table in tables if any(map(_is_inert, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_inert(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()  # the other hooks keep their order
            table.update(hooks)


def _is_exporting() -> bool:
    # not `torch.compiler.is_exporting`, which is also true while torch 2.11 compiles
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _nothing(*_: object) -> None:
    return None


def _is_inert(hook: Any) -> bool:
    return isinstance(hook, InertHook) or getattr(hook, "__func__", None) is _do_nothing


def _hide_from_scripts() -> None:
    """Make torch script and trace modules without inert hooks: it compiles all hooks that it finds."""
    recursive: Any = torch.jit._recursive
    create = recursive.create_script_module

    @functools.wraps(create)
    def create_without_hooks(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(nn_module):
            return create(nn_module, *args, **kwargs)

    recursive.create_script_module = create_without_hooks


_hide_from_scripts()
