"""Call listeners around torch's functions that clip gradients, while a monitor is open."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gradwatch.probe.device.sync import host_value_or_copy, is_on_host, to_float

Body = Callable[..., Any]

EPSILON = 1e-6  # torch.nn.utils.clip_grads_with_norm_


class ClipListener(Protocol):
    """An object that reads gradients before they are clipped. Its methods must not raise."""

    def before_clip(self, params: Sequence[Tensor]) -> None:
        """Read the gradients of parameters that are about to be clipped."""
        ...

    def after_clip(self, params: Sequence[Tensor], factor: float | Tensor | None) -> None:
        """Record the factor that clipping has scaled all these gradients by, or None if there is no such factor."""
        ...


_listeners: list[weakref.ref[ClipListener]] = []  # weak: a discarded monitor must not keep its model
_replaced: list[tuple[types.CellType, Body, Body]] = []
"""Each closure with a replaced body: the closure, torch's body, and the body that calls the listeners."""


def listen(listener: ClipListener) -> None:
    """Call a listener around each clipping until `forget`. Nothing is replaced while there is no listener.

    `clip_grad_norm_` also calls `_clip_grads_with_norm_`. Both this function and `clip_grad_value_` are closures around
    their body, since `torch.no_grad` is added to them. Replacing the body reaches callers that have imported the
    function earlier, and keeps functions that other code uses instead of torch's.
    """
    _listeners.append(weakref.ref(listener, _listeners.remove))
    if not _replaced:
        _replace(clip_grad._clip_grads_with_norm_, _norm_factor)
        _replace(clip_grad.clip_grad_value_, _no_factor)


def forget(listener: ClipListener) -> None:
    """Undo `listen`. The last listener restores torch's functions."""
    for reference in [*_listeners]:
        if reference() is listener:
            _listeners.remove(reference)
    if not _listeners:
        _restore()


def _replace(function: Callable[..., Any], factor_of: Callable[..., float | Tensor | None]) -> None:
    # other code may have replaced the function, or a future torch may define it without a closure
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(clip_grad):
        return
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "func" not in cells:
        return
    cell = cells["func"]
    body = cell.cell_contents
    replacement = _around(body, factor_of)
    cell.cell_contents = replacement
    _replaced.append((cell, body, replacement))


def _restore() -> None:
    for cell, body, replacement in _replaced:
        if cell.cell_contents is replacement:  # otherwise other code has wrapped it, and a call finds no listener
            cell.cell_contents = body
    _replaced.clear()


def _around(body: Body, factor_of: Callable[..., float | Tensor | None]) -> Body:
    """Return a body that calls the listeners before and after torch's."""

    @functools.wraps(body)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return body(parameters, *args, **kwargs)
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        listeners = [listener for reference in _listeners if (listener := reference()) is not None]
        for listener in listeners:
            listener.before_clip(params)
        result = body(params, *args, **kwargs)
        if not listeners:  # the last monitor was discarded without `close`
            _restore()
            return result
        factor = factor_of(*args, **kwargs)
        for listener in listeners:
            listener.after_clip(params, factor)
        return result

    return clip


def _norm_factor(max_norm: float, total_norm: Any, foreach: bool | None = None) -> float | Tensor | None:
    """Return the factor that torch scales gradients by, without waiting for a device."""
    if type(total_norm) is not Tensor:  # a distributed tensor
        return None
    if total_norm.dtype == torch.float32 and is_on_host(total_norm):  # without the operations of torch, 5 us
        factor: float | Tensor = float(max_norm) / (to_float(total_norm) + EPSILON)
    else:  # a factor in half precision is rounded
        factor = host_value_or_copy(float(max_norm) / (total_norm + EPSILON))
    if isinstance(factor, Tensor):
        return factor.clamp(max=1.0)
    return 1.0 if factor > 1.0 else factor  # rather than `min`, which depends on the order if one of them is nan


def _no_factor(*_: object, **__: object) -> None:
    return None
