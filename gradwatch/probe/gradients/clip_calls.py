"""Call listeners around torch's functions that clip gradients, while a monitor is open."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gradwatch.probe.call_listeners import CallListeners, Function
from gradwatch.probe.device.sync import host_value_or_copy, is_on_host, to_float

Factor = Callable[..., float | Tensor | None]
"""Returns the factor of a call of torch's body, given its arguments after the parameters."""

EPSILON = 1e-6  # torch.nn.utils.clip_grads_with_norm_


class ClipListener(Protocol):
    """An object that reads gradients before they are clipped. Its methods must not raise."""

    def before_clip(self, params: Sequence[Tensor]) -> None:
        """Read the gradients of parameters that are about to be clipped."""
        ...

    def after_clip(self, params: Sequence[Tensor], factor: float | Tensor | None) -> None:
        """Record the factor that clipping has scaled all these gradients by, or None if there is no such factor."""
        ...


def listen(listener: ClipListener) -> None:
    """Call a listener around each clipping until `forget`. Nothing is replaced while there is no listener."""
    for listeners in CLIP_LISTENERS:
        listeners.add(listener)


def forget(listener: ClipListener) -> None:
    """Undo `listen`. The last listener restores torch's functions."""
    for listeners in CLIP_LISTENERS:
        listeners.remove(listener)


def _listeners_of(function: Callable[..., Any], factor: Factor) -> Iterator[CallListeners[ClipListener]]:
    # other code may have replaced the function, or a future torch may define it without a closure
    if isinstance(function, types.FunctionType) and function.__globals__ is vars(clip_grad):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "func" in cells:
            yield CallListeners(cells["func"], "cell_contents", lambda body, listeners: _clip(body, listeners, factor))


def _clip(body: Function, listeners: CallListeners[ClipListener], factor: Factor) -> Function:
    """Return a body that calls the listeners before and after torch's."""

    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return body(parameters, *args, **kwargs)
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        present = [*listeners]
        for listener in present:
            listener.before_clip(params)
        result = body(params, *args, **kwargs)
        if present:
            scale = factor(*args, **kwargs)
            for listener in present:
                listener.after_clip(params, scale)
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


CLIP_LISTENERS = (
    *_listeners_of(clip_grad._clip_grads_with_norm_, _norm_factor),
    *_listeners_of(clip_grad.clip_grad_value_, _no_factor),
)
"""Listeners of torch's functions. `clip_grad_norm_` also calls `_clip_grads_with_norm_`. Both are closures around their
body, since `torch.no_grad` is added to them. Replacing the body reaches callers that have imported the function before,
and keeps functions that other code uses instead of torch's."""
