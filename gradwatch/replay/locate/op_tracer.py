"""Trace every operation of a step, forward and backward, with its inputs, outputs and calling line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradwatch.probe.device.sync import to_host
from gradwatch.probe.graph.dispatched import changed_arguments
from gradwatch.probe.nested import storage_id
from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.replay.locate.nan_origin import is_on_purpose
from gradwatch.replay.locate.operation_log import OperationLog
from gradwatch.replay.locate.records import Value

HALF = (torch.float16, torch.bfloat16)
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
"""Operations with an uninitialized output, which may contain anything."""
Range = tuple[float, float, int, int, bool]


@final
class OpTracer(TorchDispatchMode):
    """Records every operation that runs while the mode is active.

    The mode is below autograd: it sees the forward pass after casts and decompositions, and every operation of the
    backward pass. A fused kernel is one operation. A compiled model runs in eager mode.

    Args:
        modules: Provides the names of modules and tensors; entered by the caller.
        within: Code of the frame that runs the step. Frames outside of it are not searched for the calling line.
        widen: Whether to compute in float32 instead of half formats.
    """

    def __init__(self, modules: ModuleStack, *, within: CodeType | None = None, widen: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self._log = OperationLog(modules, within=within)
        self.operations = self._log.operations
        self._modules = modules
        self._widen = widen
        self._written: dict[int, list[int]] = {}  # operations that wrote into a storage, by identity of the storage
        self._held: dict[int, StorageWeakRef] = {}  # while a reference exists, no other storage gets this identity
        self._ranges: dict[tuple[Any, ...], Range] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        operation = self._log.begin(func)
        # measured before the call, since the operation may overwrite its inputs
        operation.inputs = tuple(self.value(t) for t in given)
        out = func(*args, **kwargs) if not self._widen else _widened(func, args, kwargs)
        changed = changed_arguments(func, args, kwargs)
        # an in-place operation returns its argument, which must not count twice
        returned = [t for t in tree_leaves(out) if isinstance(t, Tensor) and all(t is not c for c in changed)]
        before = {storage_id(t) for t in given}
        # a view computes nothing, so the values keep the operation that wrote them
        is_view = not changed and all(storage_id(t) in before for t in returned)
        if not is_view and operation.name not in UNWRITTEN:
            operation.outputs = tuple(self._wrote(t, operation.index) for t in (*returned, *changed))
            scalars = [a for a in tree_leaves((args, kwargs)) if isinstance(a, float)]
            operation.on_purpose = is_on_purpose(operation, self.operations, scalars)
        self.operations.append(operation)
        return out

    def value(self, tensor: Tensor, *, source: int | None = None) -> Value:
        """Describe a tensor: its range and its source.

        Args:
            tensor: Tensor of any kind. Without values in memory, only shape and dtype are known.
            source: Index of the operation that wrote the tensor, or None to look it up.
        """
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
            return Value(shape=shape, dtype=dtype, low=math.nan, high=math.nan)
        memory = storage_id(tensor)
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

    def restore(self) -> None:
        """Restore the gradients that the backward pass has added to."""
        self._log.restore()

    def _wrote(self, tensor: Tensor, index: int) -> Value:
        """Register that an operation wrote a tensor, and describe the tensor."""
        if tensor.layout == torch.strided:  # other layouts have no single storage
            memory = storage_id(tensor)
            self._held.setdefault(memory, StorageWeakRef(tensor.untyped_storage()))
            self._written.setdefault(memory, []).append(index)
        return self.value(tensor, source=index)

    def _source(self, memory: int, bad: bool) -> int | None:
        """Return the last operation that wrote into a storage; for bad values, the last that wrote bad values."""
        written = self._written.get(memory)
        if not written:
            return None
        # several operations may write into parts of one storage, so the last one may have written finite values
        if bad:
            for index in reversed(written):
                if self.operations[index].is_bad:
                    return index
        return written[-1]

    def _range(self, tensor: Tensor, memory: int) -> Range:
        times = len(self._written.get(memory, ()))  # each write may change the range
        key = (memory, times, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._ranges:
            self._held.setdefault(memory, StorageWeakRef(tensor.untyped_storage()))
            self._ranges[key] = _measure(tensor)
        return self._ranges[key]


def _measure(tensor: Tensor) -> Range:
    """Return the finite range, the number of non-finite values and of NaNs, and whether all non-finite are -inf."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())  # aminmax rejects complex, view_as_real rejects conj
    if not tensor.is_floating_point():
        return math.nan, math.nan, 0, 0, False
    if tensor.element_size() == 1:  # float8 has no reductions
        tensor = tensor.float()
    # NaN propagates through aminmax, so one copy to the host is sufficient for a finite tensor
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


def _widened(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation in float32 instead of a half format."""
    # arguments that are written to keep their dtype: a converted copy would receive the result instead
    kept = {id(t) for t in changed_arguments(func, args, kwargs)}

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in HALF and id(value) not in kept:
            return value.float()
        return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value

    return func(*tree_map(wide, tuple(args)), **tree_map(wide, dict(kwargs)))
