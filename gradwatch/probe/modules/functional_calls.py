"""See in an evaluation what modules call as functions: dropout and batch normalisation that do not know its mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.probe.batches.input_scale import Scale, differ, scale_of
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.parameters import Models, named_modules

FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that evaluate by another code where nobody looks on: they are left alone, and so is the model around them."""

DROPOUTS = frozenset({"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"})
"""Functions of an input, a probability and whether it is training, which is true where nobody says."""

FRAMES = 8
"""Callers among which the module is that calls a function."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


@final
class Functional:
    """Looks on at the first forward calls in evaluation mode after it was armed, which compute what they would have.

    Args:
        models: A model, or several by name.
        roots: The same as they are called.
    """

    def __init__(self, models: Models, roots: Sequence[nn.Module]) -> None:
        modules = list(named_modules(models))
        self._names = {module: name for name, module in modules}
        self._roots = [] if any(_is_left_alone(module) for _, module in modules) else list(roots)
        self._handles: list[RemovableHandle] = []
        self._inputs: list[int] = []
        self._scale: Scale | None = None
        self._found: dict[str | None, str] = {}
        self._mode: ExitStack | None = None

    def arm(self) -> None:
        """Look on at the next evaluation; once in a run."""
        for root in self._roots:
            self._handles += [
                root.register_forward_pre_hook(inert_hook(self.before)),
                root.register_forward_hook(inert_hook(self.after), always_call=True),
            ]
        self._roots = []

    def facts(self, usual: Scale | None = None) -> Iterator[Fact]:
        """Yield what was seen since it was armed, once there was an evaluation, and stop looking.

        Args:
            usual: Scale of the inputs of training, where it is known.
        """
        if not self._inputs:
            return
        self.close()
        yield from differ(usual, self._scale)
        repeats = len(self._inputs) - len(set(self._inputs))
        self._inputs.clear()
        for layer, name in self._found.items():
            text = f"{name} is called as a function and is active in evaluation mode too"
            yield "function-active", layer, text, {"evaluations of the same inputs": float(repeats)}

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, root: nn.Module, inputs: Any) -> None:
        """Begin to look, where a model is called to evaluate."""
        if root.training or torch.is_grad_enabled() or self._mode is not None:
            return
        self._inputs.append(hash_batch(inputs))
        self._scale = self._scale or scale_of(inputs)
        self._mode = ExitStack()
        self._mode.enter_context(_Look(self))

    def after(self, *_: Any) -> None:
        """End the look, also where the call raised."""
        if self._mode is not None:
            self._mode.close()
            self._mode = None

    def see(self, name: str, module: nn.Module) -> None:
        """Note that a module calls a function that is active, unless it is the module for that itself."""
        own = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
        if not isinstance(module, own) and module in self._names:
            self._found.setdefault(self._names[module] or None, name)


@final
class _Look(TorchFunctionMode):
    """Sees every function of torch that is called, and calls it."""

    def __init__(self, functional: Functional) -> None:
        super().__init__()
        self._functional = functional

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if _is_active(name, args, kwargs or {}) and (module := _caller()) is not None:
            self._functional.see(name, module)
        return func(*args, **(kwargs or {}))


def _is_left_alone(module: nn.Module) -> bool:
    """Say whether a module computes by other code, or is compiled anew, where somebody looks on."""
    return (
        isinstance(module, FAST)
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
    )


def _is_active(name: str, args: Any, kwargs: Any) -> bool:
    """Say whether a function drops something, or normalises by the batch though it is given running statistics."""
    if name in DROPOUTS:
        return bool(_given("training", 2, args, kwargs, True)) and _given("p", 1, args, kwargs, 0.5) > 0
    if name == "scaled_dot_product_attention":
        return bool(_given("dropout_p", 4, args, kwargs, 0.0) > 0)
    has_statistics = name == "batch_norm" and _given("running_mean", 1, args, kwargs, None) is not None
    return has_statistics and bool(_given("training", 5, args, kwargs, False))


def _given(name: str, place: int, args: Any, kwargs: Any, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _caller() -> nn.Module | None:
    """Return the innermost module whose method is running."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return module
    return None
