"""Read tensors on a GPU once, with Triton kernels: 6 statistics of many at a time, histograms, checksums.

Tested against obvious statistics in Triton's interpreter, and on a GPU by `python -m scripts.gpu_checks`. If a kernel
fails, torch operations replace it, with a warning.
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
from gradwatch.probe.device.sync import is_capturing, on_device, sent

NUM_STATISTICS = 6
LAUNCH = 4096  # values that one program counts, sums or checks
WARPS = 8  # of that program
ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.int16,  # widened bit by bit
    torch.float16: tl.float16,
}
EXPONENTS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""Integers of the same size, and the bits that are all set in NaN and Inf alone."""


def statistics(values: Sequence[Tensor], *, factor: float = 1.0) -> Tensor:
    """Compute the 6 statistics of flat tensors, without waiting for the device.

    Args:
        values: At least one, contiguous, of the dtypes in `ELEMENTS`, all on one device.
        factor: Factor of norm, maximum, mean and deviation.

    Returns:
        Tensor of shape (S, L), float32, on their device, as from `torch_reduce.statistics`.
    """
    with torch.cuda.device_of(values[0]):  # Triton launches on the current device
        return _statistics(values, values[0].device, factor)


def _statistics(values: Sequence[Tensor], device: torch.device, factor: float) -> Tensor:
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
    # tables of a CUDA graph have their values only once it is replayed, so that no other step may use them
    tables = cut.__wrapped__ if is_capturing(values) else cut
    numels_L, columns_L, begins_L, tensors_C, offsets_C = tables(numels, columns, device)
    found_CF = torch.empty((len(tensors_C), kernels.FIELDS), dtype=torch.float64, device=device)
    addresses = tuple(v.data_ptr() for v in values)
    kernels.read_chunks[(len(tensors_C),)](
        # addresses change whenever gradients are allocated, so the cached tables do not contain them
        on_device(addresses, device),
        numels_L,
        tensors_C,
        offsets_C,
        found_CF,
        ELEMENT=ELEMENTS[dtype],
        IS_DOUBLE=dtype == torch.float64,
        IS_BRAIN=dtype == torch.bfloat16,
        IS_ALIGNED=not any(address % kernels.ALIGNMENT for address in addresses),
        SIZE=kernels.CHUNK,
        NUM_FIELDS=kernels.FIELDS,
        num_warps=kernels.WARPS,
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
    return tuple(sent(table, device) for table in tables)


def histogram(values: Tensor, *, shift: int, lowest: int, side: int) -> Tensor:
    """Count the values of a flat tensor in bins.

    Args:
        values: Contiguous, of the dtypes in `ELEMENTS`; float64 is rounded to float32.
        shift: Number of the low bits of a float32 that a bin leaves out.
        lowest: The remaining bits of the smallest magnitude outside of the middle bin.
        side: Bins on either side of the middle one.

    Returns:
        Tensor of shape (2 * side + 1,), int64, on the device of the values.
    """
    is_brain = values.dtype == torch.bfloat16
    counts_B = torch.zeros(2 * side + 1, dtype=torch.int64, device=values.device)
    if values.numel():
        with torch.cuda.device_of(values):
            kernels.count_bins[(_num_chunks(values),)](
                values.view(torch.int16) if is_brain else values,
                values.numel(),
                counts_B,
                IS_BRAIN=is_brain,
                SHIFT=shift,
                LOWEST=lowest,
                SIDE=side,
                TABLE=1 << len(counts_B).bit_length(),
                NUM_BINS=len(counts_B),
                SIZE=LAUNCH,
                num_warps=WARPS,
            )
    return counts_B


def sum_words(words: Tensor, *, golden: int) -> Tensor:
    """Return the sum of the 64-bit words of a flat tensor, keyed by their positions, as one int64 on its device."""
    sums_C = torch.zeros(_num_chunks(words), dtype=torch.int64, device=words.device)
    if words.numel():
        with torch.cuda.device_of(words):
            kernels.sum_words[(len(sums_C),)](words, words.numel(), sums_C, GOLDEN=golden, SIZE=LAUNCH, num_warps=WARPS)
    return sums_C.sum()


def is_finite(values: Tensor) -> Tensor:
    """Return whether all values of a flat tensor are finite, as one flag on its device.

    Args:
        values: Contiguous, of the dtypes in `ELEMENTS`.
    """
    integer, exponent = EXPONENTS[values.dtype]
    non_finite_C = torch.zeros(_num_chunks(values), dtype=torch.int32, device=values.device)
    if values.numel():
        with torch.cuda.device_of(values):
            bits = values.view(integer)
            kernels.find_non_finite[(len(non_finite_C),)](
                bits, values.numel(), non_finite_C, EXPONENT=exponent, SIZE=LAUNCH, num_warps=WARPS
            )
    return ~non_finite_C.any()


def _num_chunks(values: Tensor) -> int:
    return math.ceil(values.numel() / LAUNCH)
