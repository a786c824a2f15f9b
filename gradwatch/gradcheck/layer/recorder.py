"""Record the operations of a forward pass with their module and line, and keep their results for a comparison."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.probe.graph.dispatched import changed_arguments
from gradwatch.probe.nested import storage_id
from gradwatch.probe.place import NOWHERE, Place
from gradwatch.replay.locate.call_site import find_call_site, is_user_code
from gradwatch.replay.locate.module_stack import ModuleStack

MAX_KEPT = 2**27
"""Number of values to keep of one pass; the operations after that are compared by their shapes alone."""


@final
@dataclass(slots=True, eq=False)
class RecordedOp:
    """One operation of a forward pass.

    Args:
        name: Name of the operation in torch, such as `_softmax`.
        module: Path of the module that called it; empty for the layer itself.
        module_class: Class of that module, or None outside of all modules.
        place: Line that called it; unknown if torch itself did.
        formats: Dtype, device type and number of dimensions of each input.
        shapes: Shape of each result.
        results: Copies of the results, if they were kept.
        writes: Identities of the storages that it wrote into.
    """

    name: str
    module: str
    module_class: type[nn.Module] | None
    place: Place
    formats: tuple[tuple[torch.dtype, str, int], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    results: tuple[Tensor, ...] | None = None
    writes: frozenset[int] = field(default_factory=frozenset)

    @property
    def at(self) -> dict[str, Any]:
        """Return module and line as the fields of a `LayerProperty`."""
        return {"module": self.module, "place": self.place}

    @property
    def described(self) -> str:
        """Return the operation with its module, for people: `` `softmax` in `attn` (MultiheadAttention) ``."""
        kind = self.module_class.__name__ if self.module_class else ""
        where = f" in `{self.module}` ({kind})" if self.module else f" in {kind}" if kind else ""
        return f"`{self.name}`{where}"


@final
class OpRecorder(TorchDispatchMode):
    """Record every operation while the mode is active.

    Args:
        modules: Provides the running module; entered by the caller.
        keep: Whether to keep copies of the results.
    """

    def __init__(self, modules: ModuleStack, *, keep: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.operations: list[RecordedOp] = []
        self._modules = modules
        self._keep = keep
        self._kept = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch wraps the mode, and imports its compiler for that, which takes seconds

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        given = [*_tensors((*args, *kwargs.values()))]
        place, _ = find_call_site(run_layer.__code__, skip=2)
        module, _ = self._modules.current()
        operation = RecordedOp(
            name=func.overloadpacket.__name__.lstrip("_"),
            module=module,
            module_class=type(self._modules.running[-1]) if self._modules.running else None,
            place=place,
            formats=tuple((t.dtype, t.device.type, t.dim()) for t in given),
        )
        out = func(*args, **kwargs)
        changed = changed_arguments(func, args, kwargs)
        results = [*_tensors((out, *changed))]
        operation.shapes = tuple(tuple(t.shape) for t in results)
        operation.writes = frozenset(storage_id(t) for t in changed if t.layout == torch.strided)
        self._kept += sum(t.numel() for t in results)
        if self._keep and self._kept <= MAX_KEPT:
            operation.results = tuple(t.detach().clone() for t in results)
        self.operations.append(operation)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, which nest in lists alone; pytree would be slow here."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def run_layer(call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a layer; the search for calling lines ends at this frame."""
    return call(*inputs)


def alike(a: Sequence[RecordedOp], b: Sequence[RecordedOp]) -> Iterator[tuple[RecordedOp, RecordedOp]]:
    """Yield the operations of two passes in pairs, up to the first difference in what runs."""
    for one, other in zip(a, b, strict=False):
        if one.name != other.name:
            return
        yield one, other


def first_difference(a: Sequence[RecordedOp], b: Sequence[RecordedOp]) -> RecordedOp | None:
    """Return the first operation whose kept results differ in any bit between two passes."""
    for one, other in alike(a, b):
        if one.name in ("empty", "empty_like", "new_empty", "empty_strided"):  # uninitialized memory
            continue
        if one.results is None or other.results is None:
            return None
        if not all(map(same, one.results, other.results)):
            return one
    return None


def raised_at(error: BaseException) -> Place:
    """Return the line of the user's code that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
    return Place(frames[-1].filename, frames[-1].lineno or 0) if frames else NOWHERE


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))
