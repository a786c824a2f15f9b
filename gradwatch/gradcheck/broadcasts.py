"""Find operations in which (B, 1) meets (B,) and broadcasting pairs every sample with every other one."""

# B = samples of the batch

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.probe.nested import storage_id
from gradwatch.probe.place import Place, calling_place
from gradwatch.replay.locate.module_stack import ModuleStack

_ARITHMETIC = (
    "add sub subtract mul multiply div divide true_divide truediv floor_divide floordiv remainder mod fmod pow"
)
_OTHER = "maximum minimum max min where atan2 hypot logaddexp eq ne lt le gt ge logical_and logical_or and or xor"
_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss gaussian_nll_loss poisson_nll_loss kl_div"
ELEMENTWISE = frozenset(f"{_ARITHMETIC} {_OTHER} {_LOSSES}".split())
"""Operations that broadcast their operands."""


@final
@dataclass(frozen=True, slots=True)
class Broadcast:
    """An operation whose operands both grow.

    Args:
        operation: Its name.
        shapes: Shapes of the operands.
        result: Shape that they broadcast to.
        module: Path of the module that calls it; empty for the outermost one and outside of all.
        place: Line that calls it.
    """

    operation: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result: tuple[int, ...]
    module: str
    place: Place

    @property
    def text(self) -> str:
        """Return the description for people, without the line."""
        where = f" in `{self.module}`" if self.module else ""
        a, b = self.shapes
        return f"`{self.operation}`{where} broadcasts {a} with {b} to {self.result}: every sample meets every other one"


@final
class BroadcastWatch(TorchFunctionMode):
    """Find the operations that broadcast both operands along the samples, without an axis made on purpose.

    The operands differ in their number of axes. An axis is made on purpose by `unsqueeze` or an index of None, and an
    operand meets a view of itself on purpose. Operands with the same number of axes count as an outer product.

    Args:
        samples: Size of the batch.
        modules: Provides the running module; entered by the caller.
    """

    def __init__(self, samples: int, modules: ModuleStack) -> None:
        super().__init__()
        self.found: list[Broadcast] = []
        self._samples = samples
        self._modules = modules
        self._explicit: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at the shapes of its operands."""
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in ELEMENTWISE:
            for i, a in enumerate(operands):
                for b in operands[i + 1 :]:
                    self._look(name, *((a, b) if a.dim() > b.dim() else (b, a)))
        if isinstance(out, Tensor) and self._keeps_axis(name, args, operands, out):
            self._explicit[id(out)] = weakref.ref(out)
        return out

    def _look(self, name: str, high: Tensor, low: Tensor) -> None:
        if self._is_explicit(high) or self._is_explicit(low) or not _pairs_samples(high, low, self._samples):
            return
        place, (module, _) = calling_place(), self._modules.current()
        result = tuple(torch.broadcast_shapes(high.shape, low.shape))
        found = Broadcast(name, (tuple(high.shape), tuple(low.shape)), result, module, place)
        if found not in self.found:
            self.found.append(found)

    def _keeps_axis(self, name: str, args: Any, operands: list[Tensor], out: Tensor) -> bool:
        """Return whether a result has an axis made on purpose, by this operation or by one that keeps the shape."""
        if name == "unsqueeze" or (name == "getitem" and any(i is None for i in _indices(args))):
            return True
        return any(self._is_explicit(t) and t.shape == out.shape for t in operands)

    def _is_explicit(self, tensor: Tensor) -> bool:
        kept = self._explicit.get(id(tensor))
        return kept is not None and kept() is tensor


def _name(func: Any) -> str:
    """Return the name of an operation; of an operator, without its underscores and its r for reflected operands."""
    name = getattr(func, "__name__", "")
    plain = name.strip("_")
    is_reflected = name.startswith("__r") and plain[1:] in ELEMENTWISE
    return plain[1:] if is_reflected else str(plain)


def _indices(args: Any) -> tuple[Any, ...]:
    index = args[1] if len(args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _pairs_samples(high: Tensor, low: Tensor, samples: int) -> bool:
    """Return whether the samples of the two operands lie along different axes, and both operands grow."""
    missing = high.dim() - low.dim()
    if samples < 2 or missing < 1:
        return False
    is_met = samples in high.shape[:missing]
    grows = any(a == 1 and b == samples for a, b in zip(high.shape[missing:], low.shape, strict=True))
    return is_met and grows and storage_id(high) != storage_id(low)


def crossed_samples(step: CheckedStep) -> list[str]:
    """Return a sentence for each operation of a step that pairs every sample with every other one."""
    tensors = [t for t in tree_leaves(step.batch) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        return []
    modules = ModuleStack(step.model)
    watch = BroadcastWatch(tensors[0].shape[0], modules)

    def watching() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(modules)
        stack.enter_context(watch)
        return stack

    with step.inside(watching):
        step.loss()
    return [f"{b.text} ({b.place})" if b.place else b.text for b in watch.found]
