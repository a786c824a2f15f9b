"""Detect functional dropout and batch-norm calls that ignore evaluation mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradwatch.events import FUNCTION_ACTIVE, Observation
from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.probe.batches.input_scale import InputScale, compare_scales, scale_of
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.parameters import HAVE_A_FAST_PATH, Models, is_compiled, named_modules
from gradwatch.probe.place import variables_of

DROPOUTS = frozenset({"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"})
"""Functions of an input, a probability and a training flag. The flag is true by default."""

MAX_FRAMES = 8
"""Maximum number of stack frames to search for the module that calls a function."""


@final
class FunctionalCalls:
    """Inspect the first forward calls in evaluation mode after `arm`. The results of the calls do not change.

    Args:
        models: A model, or several by name.
        roots: The same models as the loop calls them, wrappers included.
    """

    def __init__(self, models: Models, roots: Sequence[nn.Module]) -> None:
        modules = list(named_modules(models))
        self._names = {module: name for name, module in modules}
        # a function mode would make modules with a fast path run other code
        is_closed = any(is_compiled(it) or isinstance(it, HAVE_A_FAST_PATH) for _, it in modules)
        self._roots = [] if is_closed else [root for root in roots if takes_hooks(root)]
        self._handles: list[RemovableHandle] = []
        self._inputs: list[int] = []
        self._scale: InputScale | None = None
        self._found: dict[str | None, str] = {}
        self._mode: ExitStack | None = None

    def arm(self) -> None:
        """Inspect the next evaluation; once in a run."""
        for root in self._roots:
            self._handles += [
                root.register_forward_pre_hook(inert_hook(self.before)),
                # always: a call that raises must not leave the function mode active
                root.register_forward_hook(inert_hook(self.after), always_call=True),
            ]
        self._roots = []  # so that a second call does nothing

    def find(self, usual: InputScale | None = None) -> Iterator[Observation]:
        """Yield the active functions and a different input scale, after the first evaluation, and stop inspecting.

        Args:
            usual: Scale of the training inputs, or None if unknown.
        """
        if not self._inputs:
            return
        self.close()
        yield from compare_scales(usual, self._scale)
        # repeats show a loop that samples on purpose: the detector then only informs
        repeats = len(self._inputs) - len(set(self._inputs))
        self._inputs.clear()
        for layer, name in self._found.items():
            yield FUNCTION_ACTIVE.observe(layer, values={"evaluations of the same inputs": repeats}, function=name)

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    def before(self, root: nn.Module, inputs: Any) -> None:
        """Start to inspect if the forward call is an evaluation."""
        # the last condition: models may be nested, and one mode sees all calls
        if root.training or torch.is_grad_enabled() or self._mode is not None:
            return
        try:
            self._inputs.append(hash_batch(inputs))
            self._scale = self._scale or scale_of(inputs)
        except Exception:  # an unknown kind of inputs: the forward call must go on
            self.close()
            return
        self._mode = ExitStack()
        self._mode.enter_context(_FunctionInspector(self))

    def after(self, *_: Any) -> None:
        """Stop inspecting, also if the call raised."""
        if self._mode is not None:
            self._mode.close()
            self._mode = None

    def record(self, name: str, module: nn.Module) -> None:
        """Record that a module calls an active function, except for torch's own module of the function."""
        # these pass their own mode, which `TrainEvalModes` inspects
        own = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
        if not isinstance(module, own) and module in self._names:
            self._found.setdefault(self._names[module] or None, name)


@final
class _FunctionInspector(TorchFunctionMode):
    """Inspect every call of a torch function, and make it."""

    def __init__(self, functional: FunctionalCalls) -> None:
        super().__init__()
        self._functional = functional

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if _is_active(name, args, kwargs or {}) and (module := _caller()) is not None:
            self._functional.record(name, module)
        return func(*args, **(kwargs or {}))


def _is_active(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function drops values, or normalizes by the batch although it gets running statistics."""
    # argument positions and defaults are as in torch.nn.functional
    if name in DROPOUTS:
        return bool(_argument("training", 2, args, kwargs, True)) and _argument("p", 1, args, kwargs, 0.5) > 0
    if name == "scaled_dot_product_attention":
        return bool(_argument("dropout_p", 4, args, kwargs, 0.0) > 0)
    has_statistics = name == "batch_norm" and _argument("running_mean", 1, args, kwargs, None) is not None
    return has_statistics and bool(_argument("training", 5, args, kwargs, False))


def _argument(name: str, position: int, args: Any, kwargs: Any, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _caller() -> nn.Module | None:
    """Return the innermost module with a running method."""
    frame = sys._getframe(1)  # of the function mode itself
    for _ in range(MAX_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if "self" in frame.f_code.co_varnames and isinstance(module := variables_of(frame).get("self"), nn.Module):
            return module
    return None
