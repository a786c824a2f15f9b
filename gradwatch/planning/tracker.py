"""Follow every storage that the operations of a step create, save for the backward pass, and free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gradwatch.planning.ledger import Ledger
from gradwatch.planning.workspace import workspace_bytes

aten = torch.ops.aten


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    # torch's registry has the attention of CUDA only
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
"""Floating-point operations of an operation, as functions of its arguments."""


class ValueNeededError(Exception):
    """The step branches on a value that a tensor without data does not have."""


@final
class StorageTracker(TorchDispatchMode):
    """Counts the storages of all tensors that operations take and return, and their floating-point operations.

    Tensors without data have no values. A number that the step reads is taken as 1, and a mask as all true, which
    needs the most memory. A step that reads a truth value may branch on it, so it raises `ValueNeededError`.

    Args:
        ledger: Counts the bytes.

    Attributes:
        flops: Operations so far, by torch's own formulas. Its FlopCounterMode would keep tensors alive.
        moved_bytes: Bytes that the operations without a formula, except views, have read and written so far.
        host_bytes: Bytes that have moved between devices so far.
        has_uncounted: Whether the workspace of an operation is not known.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._ledger = ledger
        self.flops = 0
        self.moved_bytes = 0
        self.host_bytes = 0
        self.has_uncounted = False
        self._overflows: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its tensors."""
        if func is torch.ops.prim.device.default:  # a query of a tensor's properties: half of all calls
            return func(*args)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # runs as operations on the tensors inside of it
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in inputs:
            self._ledger.add(tensor)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflows.append(args[1])
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self._without_data(func, args)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        flops = 0
        for tensor in outputs:
            self._ledger.add(tensor)
        if formula := FORMULAS.get(func.overloadpacket):
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self.flops += flops
        elif not func.is_view:
            if func is aten._to_copy.default and out.device != args[0].device:
                self.host_bytes += out.numel() * out.itemsize
            self.moved_bytes += sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs))
        self._count_workspace(func, args, kwargs, flops)
        return out

    def _count_workspace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, flops: int) -> None:
        nbytes = workspace_bytes(func, args, kwargs, device=self._ledger.device, flops=flops)
        if nbytes is None:
            self.has_uncounted = True
        elif nbytes:
            self._ledger.take_briefly(nbytes)

    def _without_data(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return a result for an operation whose result depends on the data."""
        if func is aten._local_scalar_dense.default and args[0].dtype != torch.bool:
            # a GradScaler skips the update if its overflow is not 0
            is_overflow = any(args[0] is tensor for tensor in self._overflows)
            value = 0 if is_overflow else 1
            return float(value) if args[0].is_floating_point() else value
        if func is aten.index.Tensor:
            indices = args[1]
            if len(indices) == 1 and indices[0].dtype == torch.bool:
                return args[0].new_empty((indices[0].numel(), *args[0].shape[indices[0].ndim :]))
        raise ValueNeededError(f"{func} needs the values of its tensors")


@final
class _Saved:
    """A tensor that a node of the autograd graph holds; torch drops this object with the node's tensors."""

    __slots__ = ("_ledger", "tensor")

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor = tensor
        self._ledger = ledger

    def __del__(self) -> None:
        self._ledger.release(self.tensor)


def saved_tensors(ledger: Ledger, on_save: Callable[[int], None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context that counts the tensors that the autograd graph saves.

    Args:
        ledger: Counts the bytes.
        on_save: Called with the bytes that each saved tensor adds; 0 if its storage is held anyway.
    """

    def pack(tensor: Tensor) -> Any:
        added = ledger.save(tensor)
        if added is None:
            return tensor
        on_save(added)
        # detached: an output would hold the node that holds it, and a graph that is never run would stay
        return _Saved(tensor.detach(), ledger)

    def unpack(packed: Any) -> Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
