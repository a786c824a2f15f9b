"""Hook torch as a whole: optimizers, forward and backward passes, loads of weights and loss scaling, of any model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradwatch.autowatch.validation import LOSS_FUNCTIONS
from gradwatch.probe.graph.in_place import IN_PLACE
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.modules.loaded_weights import note_load

TO_BOTH_LINES = (
    "gradwatch: `gradwatch run --in-place -- ...` names the line that saved this tensor and the line that changed it"
)

_EXTRA_TIME = "Using `torch.compile\\(module\\)` when there are global hooks"
"""Warning of torch about any hook on all modules. Ours is gone when the compiled module is traced."""


@final
class TorchHooks:
    """Hooks torch for a listener, until `remove`.

    Args:
        listener: Receives the calls of the script, a `ScriptWatch`. Its methods must not raise.
    """

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._forward: RemovableHandle | None = None
        self._unscaled: tuple[Tensor, Tensor] | None = None
        self._stepped: Optimizer | None = None
        self._is_removed = False
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._replace(Optimizer, "__init__", functools.partial(_around_init, listener.on_optimizer))
        self._replace(GradScaler, "__init__", functools.partial(_around_init, listener.on_scaler))
        # `Tensor.backward` calls it through its module, so this reaches every backward pass
        self._replace(torch.autograd, "backward", self._around_backward)
        self._replace(nn.Module, "zero_grad", self._around_clearing)
        self._replace(nn.Module, "load_state_dict", _around_load)
        for name in LOSS_FUNCTIONS:
            self._replace(functional, name, self._around_loss)
        self._replace(GradScaler, "scale", self._around_scale)
        self._replace(GradScaler, "step", self._around_scaler_step)
        self._replace(GradScaler, "update", self._around_update)

    def watch_forward(self, is_on: bool) -> None:
        """Start or stop reporting forward passes to the listener, at the cost of a call for each module."""
        if is_on and self._forward is None:
            warnings.filterwarnings("ignore", _EXTRA_TIME)
            hook = inert_hook(self._listener.on_forward)
            self._forward = nn.modules.module.register_module_forward_pre_hook(hook)
        elif not is_on and self._forward is not None:
            self._forward.remove()
            self._forward = None

    def stay_last(self) -> None:
        """Move the hook after all other global optimizer hooks.

        In `before_step`, a listener may attach or detach a loop, which adds or removes such hooks while torch iterates
        over them. Torch would raise if another hook followed.
        """
        hooks, key = _global_optimizer_pre_hooks, self._handles[0].id
        if key in hooks and next(reversed(hooks)) != key:
            hooks[key] = hooks.pop(key)

    def loss_of(self, tensor: Tensor) -> Tensor:
        """Return the loss whose scaled value is a tensor, or the tensor itself."""
        unscaled, self._unscaled = self._unscaled, None
        return unscaled[0] if unscaled is not None and unscaled[1] is tensor else tensor

    def remove(self) -> None:
        """Remove all hooks."""
        self._is_removed = True
        self.watch_forward(False)
        for handle in self._handles:
            handle.remove()
        for owner, name, original, replacement in self._replaced:
            if vars(owner)[name] is replacement:  # otherwise other code has wrapped it
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = vars(owner)[name]
        replacement = functools.wraps(original)(around(original))
        self._replaced.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._listener.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._stepped = optimizer
            self._listener.after_step(optimizer)
            self.stay_last()

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed:  # other code had wrapped this function, and put it back since
                return run(tensors, grad_tensors, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._listener.on_backward(tensors, grad_tensors)
            try:
                return run(tensors, grad_tensors, *args, **kwargs)
            except RuntimeError as error:
                if IN_PLACE in str(error) and not getattr(error, "__notes__", ()):
                    error.add_note(TO_BOTH_LINES)
                raise

        return backward

    def _around_clearing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._listener.before_clearing()
            return run(module, *args, **kwargs)

        return zero_grad

    def _around_loss(self, run: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener

        def loss(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if not torch.compiler.is_compiling():
                listener.on_loss(run, args, kwargs, result)
            return result

        # TorchScript compiles the source of `run` with the global names of what it finds in its place
        return FunctionType(loss.__code__, run.__globals__, run.__name__, None, loss.__closure__)

    def _around_scale(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            scaled = run(scaler, outputs)
            if isinstance(outputs, Tensor) and scaled is not outputs:
                self._unscaled = outputs, scaled
            return scaled

        return scale

    def _around_scaler_step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped = None
            result = run(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled() and self._stepped is None:
                self._listener.after_step(getattr(optimizer, "optimizer", optimizer))  # a wrapper as of Accelerate
            self._stepped = None  # keeps no optimizer alive
            return result

        return step

    def _around_update(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = run(scaler, *args, **kwargs)
            self._listener.after_scaler_update()
            return result

        return update


def _around_load(run: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys = run(module, *args, **kwargs)
        if isinstance(keys, _IncompatibleKeys):  # a class may return anything
            with contextlib.suppress(Exception):  # of any kind: the script must not stop
                note_load(module, missing=keys.missing_keys, unexpected=keys.unexpected_keys)
        return keys

    return load_state_dict


def _around_init(notify: Callable[[Any], None], init: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:
        init(instance, *args, **kwargs)
        notify(instance)

    return __init__
