"""Reduce tensors on a GPU to 6 statistics each, with Triton kernels: two launches for all tensors of a dtype.

Tested against obvious statistics in Triton's interpreter, and compiled for NVIDIA's sm_80 and sm_90; not yet run on a
GPU. If a kernel fails, torch operations replace it, with a warning.
"""

# L = tensors, S = statistics (the first six of catalogue.PARAM)

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from gradwatch.probe.device import triton_kernels as kernels
from gradwatch.probe.device.sync import on_device

NUM_STATISTICS = 6
ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.int16,  # widened bit by bit
    torch.float16: tl.float16,
}


def statistics(values: Sequence[Tensor], *, factor: float = 1.0) -> Tensor:
    """Compute the 6 statistics of flat tensors, without waiting for the device.

    Args:
        values: At least one, contiguous, of the dtypes in `ELEMENTS`, all on one device.
        factor: Factor of norm, maximum, mean and deviation.

    Returns:
        Tensor of shape (S, L), float32, on their device, as from `torch_reduce.statistics`.
    """
    device = values[0].device
    row_SL = torch.full((NUM_STATISTICS, len(values)), math.nan, dtype=torch.float32, device=device)
    by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for i, tensor in enumerate(values):
        if tensor.numel():
            by_dtype[tensor.dtype].append(i)
    empty = [i for i, tensor in enumerate(values) if not tensor.numel()]
    # an empty tensor has no chunk; its norm, maximum and count are 0, and the rest stays nan
    if empty:
        index = on_device(tuple(empty), device)
        row_SL[:2].index_fill_(1, index, 0.0)
        row_SL[5:].index_fill_(1, index, 0.0)
    for dtype, columns in by_dtype.items():
        _read([values[i] for i in columns], tuple(columns), dtype, row_SL, factor)
    return row_SL


def _read(
    values: Sequence[Tensor], columns: tuple[int, ...], dtype: torch.dtype, row_SL: Tensor, factor: float
) -> None:
    device = row_SL.device
    numels = tuple(v.numel() for v in values)
    numels_L, columns_L, begins_L, tensors_C, offsets_C = cut(numels, columns, device)
    found_CF = torch.empty((len(tensors_C), kernels.FIELDS), dtype=torch.float64, device=device)
    kernels.read_chunks[(len(tensors_C),)](
        # addresses change whenever gradients are allocated, so the cached tables do not contain them
        on_device(tuple(v.data_ptr() for v in values), device),
        numels_L,
        tensors_C,
        offsets_C,
        found_CF,
        ELEMENT=ELEMENTS[dtype],
        IS_DOUBLE=dtype == torch.float64,
        IS_BRAIN=dtype == torch.bfloat16,
        SIZE=kernels.CHUNK,
        NUM_FIELDS=kernels.FIELDS,
    )
    kernels.add_chunks[(len(values),)](
        found_CF,
        begins_L,
        numels_L,
        columns_L,
        row_SL,
        row_SL.shape[1],
        factor,
        SIZE=kernels.CHUNK,
        NUM_FIELDS=kernels.FIELDS,
        AT_ONCE=kernels.ABREAST,
    )


@functools.lru_cache(maxsize=16)
def cut(numels: tuple[int, ...], columns: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the tables of the chunks of a model, on its device; they stay the same from step to step.

    Returns:
        Five tables. By tensor: its size, its column, and its first chunk (at the end, the number of all chunks). By
        chunk: its tensor, and its offset in the tensor.
    """
    chunks = [math.ceil(n / kernels.CHUNK) for n in numels]
    tensors_C = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), torch.tensor(chunks, device="cpu"))
    begins_L = torch.tensor([0, *accumulate(chunks)], dtype=torch.int64, device="cpu")
    offsets_C = (torch.arange(len(tensors_C), device="cpu") - begins_L[tensors_C]) * kernels.CHUNK
    tables = (torch.tensor(numels, device="cpu"), torch.tensor(columns, device="cpu"), begins_L, tensors_C, offsets_C)
    return tuple(table.to(device) for table in tables)
