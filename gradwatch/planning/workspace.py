"""Measure the workspace of operations, which their kernels allocate without a visible operation."""

# B = samples of a batch

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from gradwatch.planning.ledger import block_bytes

aten = torch.ops.aten
OF_BATCH = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""Convolutions, with the positions of the arguments whose first dimension is the batch."""
TRIED_SAMPLES = 16
"""Samples with which to try a convolution of a larger batch on a CPU: below 16, torch uses other kernels."""
MAX_FLOPS = 1e10
"""Operations of the largest convolution to try on a CPU: a fraction of a second."""
MAX_FREE_FRAC = 0.5
"""Maximum fraction of a GPU's free memory for the arguments of an operation, so that its result fits as well."""
TRIED_ON_GPU = {
    *OF_BATCH,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit.default,
    aten.cudnn_batch_norm.default,
    aten.cudnn_batch_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.embedding_dense_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.cumsum.default,
    aten.sort.default,
    aten.topk.default,
}
"""Operations whose kernels take workspace on a GPU, and for which zeros are valid arguments.

No others are tried: some read host memory or assert properties of their arguments, and would end the process.
"""


@dataclass(frozen=True)
class _Form:
    """A tensor's form, without its data and, if `is_of_batch`, without the number of samples."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_of_batch: bool = False

    def zeros(self, samples: int) -> Tensor:
        """Return a tensor of this form, filled with zeros."""
        size = (samples, *self.shape) if self.is_of_batch else self.shape
        return torch.empty_strided(size, self.stride, dtype=self.dtype, device=self.device).zero_()


def workspace_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, device: str, flops: int = 0
) -> int | None:
    """Return the bytes that an operation allocates in addition to its outputs, or None if measuring costs too much.

    Which kernel runs, and what it allocates, depends on the machine. So each distinct operation runs once, on zeros: on
    a GPU, if there is one, as it is. On a CPU only convolutions have workspace. For a large batch they run with 16 and
    with 17 samples instead, since the size of each allocation is a line over the samples.

    Args:
        func: The operation.
        args: Its arguments, with or without data.
        kwargs: Its arguments by name.
        device: Type of the device to count on.
        flops: Its floating-point operations.
    """
    if device == "cuda" and torch.cuda.is_available():
        return _on_gpu(func, args, kwargs or {})
    if device == "cpu" and func in OF_BATCH:
        return _of_convolution(func, args, flops)
    return 0


def _of_convolution(func: Any, args: tuple[Any, ...], flops: int) -> int | None:
    samples = args[0].shape[0]
    tried = (TRIED_SAMPLES, TRIED_SAMPLES + 1) if samples > 2 * TRIED_SAMPLES else (samples,)
    if flops / samples * sum(tried) > MAX_FLOPS:
        return None
    forms = tuple(_form(arg, is_of_batch=i in OF_BATCH[func]) for i, arg in enumerate(args))
    signature = _hashable((forms, {}))
    found = [_allocations(func, *signature, count) for count in tried]
    if len({len(sizes) for sizes in found}) > 1:
        return None
    further = samples - TRIED_SAMPLES if len(found) > 1 else 0
    return _peak([a + further * (b - a) for a, b in zip(found[0], found[-1], strict=True)])


def _on_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if func not in TRIED_ON_GPU:
        return 0
    given = tree_leaves((args, kwargs))
    free, _ = torch.cuda.mem_get_info()
    if sum(tensor.nbytes for tensor in given if isinstance(tensor, Tensor)) > MAX_FREE_FRAC * free:
        return None
    names = [argument.name for argument in func._schema.arguments]
    # without dropout, so that no kernel reads the state of a random generator, which has no value here
    args = tuple(0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=False))
    try:
        signature = _hashable(tree_map_only(Tensor, _form, (args, kwargs)))
        return _peak(_allocations(func, *signature, 1, is_second_call=True))
    except RuntimeError:  # the result does not fit
        return None


def _form(value: Any, *, is_of_batch: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Form(tuple(value.shape[is_of_batch:]), value.stride(), value.dtype, str(value.device), is_of_batch)


def _hashable(tree: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the leaves of nested arguments, and their structure."""
    leaves, structure = tree_flatten(tree)
    return tuple(leaves), structure


@functools.cache
def _allocations(
    func: Any, leaves: tuple[Any, ...], structure: Any, samples: int, *, is_second_call: bool = False
) -> tuple[int, ...]:
    """Return the sizes of all allocations of an operation in their order, negative where memory is freed.

    The bytes of the outputs are subtracted at the end. In a first call, the libraries of a GPU also allocate what they
    keep.
    """
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_unflatten(
            [leaf.zeros(samples) if isinstance(leaf, _Form) else leaf for leaf in leaves], structure
        )
        if is_second_call:
            func(*args, **kwargs)
        # not the newer profiler, which takes longer to start and logs to standard error
        _autograd._enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            out = func(*args, **kwargs)
        finally:
            events = _autograd._disable_profiler_legacy()
    given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
    outputs = {
        tensor.untyped_storage()._cdata: block_bytes(tensor.untyped_storage().nbytes(), tensor.device.type)
        for tensor in tree_leaves(out)
        if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given
    }
    allocated = [event for thread in events for event in thread if str(event.kind()) == "memory_alloc"]
    sizes = [event.cpu_memory_usage() + event.cuda_memory_usage() for event in allocated]
    return (*sizes, -sum(outputs.values()))


def _peak(sizes: Sequence[int]) -> int:
    """Return the peak of the allocations without the outputs, whose bytes end the list."""
    *changes, freed = sizes
    return max(0, max(itertools.accumulate(changes), default=0) + freed)
