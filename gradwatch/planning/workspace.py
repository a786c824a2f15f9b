"""Measure the workspace of convolutions on the CPU, which their kernels allocate where no operation shows it."""

# B = samples of a batch

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
OF_BATCH = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""Convolutions, with the positions of the arguments whose first dimension is the batch."""
FEW = 16
"""Samples with which a convolution of a larger batch is tried: torch takes other kernels for fewer than 16."""
MAX_FLOPS = 1e10
"""Operations of the largest convolution to try: a fraction of a second."""

_Signature = tuple[Any, ...]


def workspace_bytes(func: Any, args: tuple[Any, ...], flops: int) -> int | None:
    """Return the bytes that an operation takes beside its outputs, or None if that would take too long to find out.

    A kernel may copy its inputs and outputs into a layout of its own, which depends on the machine. So each distinct
    convolution runs once, on zeros. For a large batch it runs with 16 and with 17 samples instead, since the size of
    each allocation is a line over the samples.

    Args:
        func: The operation; those that are no convolutions have 0.
        args: Its arguments, with or without data.
        flops: Its floating-point operations.
    """
    positions = OF_BATCH.get(func)
    if positions is None or args[0].device.type != "cpu":
        return 0
    samples = args[0].shape[0]
    tried = (FEW, FEW + 1) if samples > 2 * FEW else (samples,)
    if flops / samples * sum(tried) > MAX_FLOPS:
        return None
    signature = tuple(_described(arg, is_of_batch=i in positions) for i, arg in enumerate(args))
    found = [_allocations(func, signature, count) for count in tried]
    return _peak(found, samples) if len({len(sizes) for sizes in found}) == 1 else None


def _described(arg: Any, *, is_of_batch: bool) -> Any:
    """Return an argument as hashable data, without the number of samples."""
    if isinstance(arg, Tensor):
        return ("tensor", tuple(arg.shape[is_of_batch:]), arg.stride(), arg.dtype, is_of_batch)
    return tuple(arg) if isinstance(arg, list) else arg


@functools.cache
def _allocations(func: Any, signature: _Signature, samples: int) -> tuple[int, ...]:
    """Return the sizes of all allocations of an operation in their order, negative where memory is freed.

    The bytes of the outputs are subtracted at the end.
    """

    def made(described: Any) -> Any:
        if not (isinstance(described, tuple) and described and described[0] == "tensor"):
            return list(described) if isinstance(described, tuple) else described
        _, shape, stride, dtype, is_of_batch = described
        size = (samples, *shape) if is_of_batch else shape
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu").zero_()

    with _disable_current_modes(), torch.no_grad():
        args = [made(described) for described in signature]
        # not the newer profiler, which takes longer to start and logs to standard error
        _autograd._enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            out = func(*args)
        finally:
            events = _autograd._disable_profiler_legacy()
    sizes = [e.cpu_memory_usage() for thread in events for e in thread if str(e.kind()) == "memory_alloc"]
    outputs = [out] if isinstance(out, Tensor) else [tensor for tensor in out if tensor is not None]
    return (*sizes, -sum(tensor.nbytes for tensor in outputs))


def _peak(found: list[tuple[int, ...]], samples: int) -> int:
    """Return the largest sum of allocations beside the outputs, for a number of samples."""
    first, last = found[0], found[-1]
    further = samples - FEW if len(found) > 1 else 0
    *sizes, freed = (a + further * (b - a) for a, b in zip(first, last, strict=True))
    return max(0, max(itertools.accumulate(sizes), default=0) + freed)
