"""Follow every operation of a step, forward and backward: what went in, what came out, who called it."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradwatch.probe.device.sync import to_host
from gradwatch.replay.locate.call_site import find_call_site
from gradwatch.replay.locate.module_stack import ModuleStack, storage
from gradwatch.replay.locate.nan_origin import is_on_purpose
from gradwatch.replay.locate.records import Operation, Value

HALF = (torch.float16, torch.bfloat16)
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
"""Operations whose output holds no values yet."""
Range = tuple[float, float, int, int, bool]


@final
class OpTracer(TorchDispatchMode):
    """Writes down every operation that runs while it is entered.

    It sees what autograd calls, so a forward pass as it was cast and decomposed, and every operation of the backward
    pass; what a fused kernel does inside is one operation. A compiled model runs as it was written.

    Args:
        modules: Names modules and tensors; entered by the caller.
        within: Code of the frame that runs the step: lines around it did not call an operation.
        widen: Compute in float32 whatever would be computed in a half format.
    """

    def __init__(self, modules: ModuleStack, *, within: CodeType | None = None, widen: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.operations: list[Operation] = []
        self._modules = modules
        self._within = within
        self._widen = widen
        self._made: dict[int, int] = {}  # operation by the number of the autograd node that it made
        self._written: dict[int, list[int]] = {}  # operations that wrote into a storage, by its identity
        self._held: dict[int, StorageWeakRef] = {}  # while it is held, no other storage gets its identity
        self._ranges: dict[tuple[Any, ...], Range] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}  # leaf, its gradient, a copy of that

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and write it down."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        operation = self._called(func)
        operation.inputs = tuple(self.value(t) for t in given)
        out = func(*args, **kwargs) if not self._widen else _widened(func, args, kwargs)
        changed = _changed(func, args, kwargs)
        returned = [t for t in tree_leaves(out) if isinstance(t, Tensor) and all(t is not c for c in changed)]
        before = {storage(t) for t in given}
        is_view = not changed and all(storage(t) in before for t in returned)
        if not is_view and operation.name not in UNWRITTEN:
            operation.outputs = tuple(self._wrote(t, operation.index) for t in (*returned, *changed))
            scalars = [a for a in tree_leaves((args, kwargs)) if isinstance(a, float)]
            operation.on_purpose = is_on_purpose(operation, self.operations, scalars)
        self.operations.append(operation)
        return out

    def value(self, tensor: Tensor, *, source: int | None = None) -> Value:
        """Return a tensor as a value: its range, and where it comes from.

        Args:
            tensor: Of any kind; of one without values in memory, only shape and dtype are told.
            source: The operation that wrote it, where that is known.
        """
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
            return Value(shape=shape, dtype=dtype, low=math.nan, high=math.nan)
        memory = storage(tensor)
        low, high, bad, nans, negative_only = self._range(tensor, memory)
        source = self._source(memory, bad > 0) if source is None else source
        name, origin = self._modules.leaves.get(memory, ("", "constant")) if source is None else ("", None)
        return Value(
            shape=shape,
            dtype=dtype,
            low=low,
            high=high,
            bad=bad,
            nans=nans,
            negative_only=negative_only,
            source=source,
            name=name,
            origin=origin,
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the gradients to which the backward pass has added."""
        for leaf, grad, values in self._grads.values():
            leaf.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)

    def _wrote(self, tensor: Tensor, index: int) -> Value:
        """Note that an operation wrote a tensor, and return it as a value."""
        if tensor.layout == torch.strided:
            memory = storage(tensor)
            self._held.setdefault(memory, StorageWeakRef(tensor.untyped_storage()))
            self._written.setdefault(memory, []).append(index)
        return self.value(tensor, source=index)

    def _called(self, func: Any) -> Operation:
        """Return the next operation, with who called it."""
        index, name = len(self.operations), func.overloadpacket.__name__.lstrip("_")
        place, again = find_call_site(self._within, skip=3)
        module, kind = self._modules.current()
        node = torch._C._current_autograd_node()
        if node is not None and not again:
            return self._called_back(node, Operation(index=index, name=name, phase="backward", place=place))
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, index)
        if again and not kind:
            module, kind = self._module_of(name, place)
        return Operation(index=index, name=name, phase="forward", module=module, module_type=kind, place=place)

    def _called_back(self, node: Any, operation: Operation) -> Operation:
        """Trace an operation of the backward pass to the line of the forward pass that made its node."""
        operation.node = node.name().rpartition("::")[2]
        operation.forward = self._made.get(node._sequence_nr())
        if operation.forward is not None:
            made = self.operations[operation.forward]
            operation.module, operation.module_type = made.module, made.module_type
            operation.place = operation.place or made.place  # a backward pass in Python has a line of its own
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            grad = leaf.grad
            self._grads.setdefault(id(leaf), (leaf, grad, None if grad is None else grad.clone()))
            operation.leaf, _ = self._modules.leaves.get(storage(leaf), ("a tensor", "constant"))
        return operation

    def _module_of(self, name: str, place: object) -> tuple[str, str]:
        """Return the module of an operation that runs again, outside of the calls of modules."""
        for other in self.operations:
            if other.name == name and other.place == place and other.module_type:
                return other.module, other.module_type
        return "", ""

    def _source(self, memory: int, bad: bool) -> int | None:
        """Return the operation that wrote a tensor's values: where they are not finite, the last that wrote such."""
        written = self._written.get(memory)
        if not written:
            return None
        if bad:
            for index in reversed(written):
                if self.operations[index].is_bad:
                    return index
        return written[-1]

    def _range(self, tensor: Tensor, memory: int) -> Range:
        times = len(self._written.get(memory, ()))
        key = (memory, times, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._ranges:
            self._held.setdefault(memory, StorageWeakRef(tensor.untyped_storage()))
            self._ranges[key] = _measure(tensor)
        return self._ranges[key]


def _measure(tensor: Tensor) -> Range:
    """Return the finite range of a tensor, how many values are not finite, how many are NaN, and if all are -inf."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return math.nan, math.nan, 0, 0, False
    if tensor.element_size() == 1:  # float8 has no reductions
        tensor = tensor.float()
    low, high = (float(v) for v in to_host(torch.stack(torch.aminmax(tensor)).double()))
    if math.isfinite(low) and math.isfinite(high):
        return low, high, 0, 0, False
    finite = tensor[torch.isfinite(tensor)]
    if finite.numel():
        low, high = (float(v) for v in to_host(torch.stack(torch.aminmax(finite)).double()))
    else:
        low = high = math.nan
    counts = torch.stack([torch.isnan(tensor).sum(), torch.isneginf(tensor).sum()])
    nans, negative = (int(n) for n in to_host(counts))
    bad = tensor.numel() - finite.numel()
    return low, high, bad, nans, bad == negative


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)]
    return [t for t in tree_leaves(written) if isinstance(t, Tensor)]


def _widened(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation in float32 that would run in a half format; what it writes into stays as it is."""
    kept = {id(t) for t in _changed(func, args, kwargs)}

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in HALF and id(value) not in kept:
            return value.float()
        return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value

    return func(*tree_map(wide, tuple(args)), **tree_map(wide, dict(kwargs)))


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models as they were written."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # that hooks see the wrapper, too, does no harm
        yield
