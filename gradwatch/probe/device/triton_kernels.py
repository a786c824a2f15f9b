"""Read many tensors in one launch with Triton kernels; imported only with a GPU and Triton."""

# C = chunks of all tensors, L = tensors, F = fields of a chunk, S = statistics
#
# tensors are cut into chunks: each program reads one chunk and writes its fields to a separate row, and another launch
# adds up the chunks of each tensor in order, so the result does not depend on the order of the programs; magnitudes
# compare as integers, as on the CPU: NaN is above Inf, and subnormal values are not zero even if the GPU flushes them

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096
FIELDS = 7  # scale; divided by it: sum, squares, squares from the mean; then largest magnitude, zeros, non-finite
ABREAST = 128  # chunks that one program adds up at a time


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def describe(
    x: tl.tensor,
    is_there: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    IS_DOUBLE: tl.constexpr,
    IS_BRAIN: tl.constexpr,
) -> None:
    """Write the fields of one chunk. Values past the end of the tensor are zero."""
    # `IS_...` are constants of the compilation, so only one branch is compiled
    if IS_DOUBLE:
        magnitude = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        largest = tl.max(magnitude)
        is_ill = magnitude >= 0x7FF0000000000000
        absmax = largest.to(tl.float64, bitcast=True)
    else:
        # a bfloat16 is the upper half of a float32, also if it is subnormal
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if IS_BRAIN else x.to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitude)
        is_ill = magnitude >= 0x7F800000
        absmax = largest.to(tl.float32, bitcast=True)
    ill = tl.sum(is_ill.to(tl.int32))
    zeros = tl.sum((is_there & (magnitude == 0)).to(tl.int32))
    # the squares of huge and tiny values leave the range of a float
    scale = tl.where(largest > 0, absmax, 1.0)
    scale = tl.where(ill == 0, scale, 1.2676506002282294e30)  # 2^100: finite values next to an Inf must not become Inf
    # `/` of floats is approximate on a GPU; `div_rn` rounds correctly
    y = x / scale if IS_DOUBLE else tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    mean = tl.sum(y) / count
    away = tl.where(is_there, y - mean, 0.0)  # padding is 0, not the mean
    tl.store(out, scale.to(tl.float64))
    tl.store(out + 1, tl.sum(y).to(tl.float64))
    tl.store(out + 2, tl.sum(y * y).to(tl.float64))
    tl.store(out + 3, tl.sum(away * away).to(tl.float64))
    tl.store(out + 4, absmax.to(tl.float64))
    tl.store(out + 5, zeros.to(tl.float64))
    tl.store(out + 6, ill.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def locate(
    tensors_C: tl.tensor, offsets_C: tl.tensor, numels_L: tl.tensor, SIZE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return the chunk of this program, its tensor, the positions in the tensor, their mask, and their number."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors_C + chunk)
    offset = tl.load(offsets_C + chunk)
    numel = tl.load(numels_L + tensor)
    places = offset + tl.arange(0, SIZE)
    return chunk, tensor, places, places < numel, tl.minimum(numel - offset, SIZE)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def read_chunks(
    addresses_L: tl.tensor,
    numels_L: tl.tensor,
    tensors_C: tl.tensor,
    offsets_C: tl.tensor,
    found_CF: tl.tensor,
    ELEMENT: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    IS_BRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
) -> None:
    """Sum up one chunk in the precision of its values, scaled to magnitudes of at most 1."""
    chunk, tensor, places, is_there, count = locate(tensors_C, offsets_C, numels_L, SIZE)
    data = tl.load(addresses_L + tensor).to(tl.pointer_type(ELEMENT))
    x = tl.load(data + places, mask=is_there, other=0.0)
    describe(x, is_there, count, found_CF + chunk * NUM_FIELDS, IS_DOUBLE, IS_BRAIN)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_chunks(
    found_CF: tl.tensor,
    begins_L: tl.tensor,
    numels_L: tl.tensor,
    columns_L: tl.tensor,
    out_SL: tl.tensor,
    stride: tl.tensor,
    factor: tl.tensor,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Write the statistics of one tensor from the fields of its chunks."""
    tensor = tl.program_id(0)
    begin = tl.load(begins_L + tensor)
    end = tl.load(begins_L + tensor + 1)
    numel = tl.load(numels_L + tensor)
    n = numel.to(tl.float64)
    lanes = tl.arange(0, AT_ONCE)
    total = tl.zeros((AT_ONCE,), tl.float64)
    squares = tl.zeros((AT_ONCE,), tl.float64)
    zeros = tl.zeros((AT_ONCE,), tl.float64)
    ill = tl.zeros((AT_ONCE,), tl.float64)
    absmax = tl.zeros((AT_ONCE,), tl.int64)  # as bits, in which NaN is the largest
    for first in range(begin, end, AT_ONCE):
        here = found_CF + (first + lanes) * NUM_FIELDS
        is_there = first + lanes < end
        scale = tl.load(here, mask=is_there, other=0.0)
        total += scale * tl.load(here + 1, mask=is_there, other=0.0)
        squares += scale * scale * tl.load(here + 2, mask=is_there, other=0.0)
        found = tl.load(here + 4, mask=is_there, other=0.0)
        absmax = tl.maximum(absmax, found.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF)
        zeros += tl.load(here + 5, mask=is_there, other=0.0)
        ill += tl.load(here + 6, mask=is_there, other=0.0)
    mean = tl.sum(total) / n
    # a second loop: deviations need the mean of all chunks
    spread = tl.zeros((AT_ONCE,), tl.float64)
    for first in range(begin, end, AT_ONCE):
        here = found_CF + (first + lanes) * NUM_FIELDS
        is_there = first + lanes < end
        scale = tl.load(here, mask=is_there, other=0.0)
        within = scale * scale * tl.load(here + 3, mask=is_there, other=0.0)
        count = tl.minimum(numel - (first + lanes - begin) * SIZE, SIZE).to(tl.float64)
        apart = scale * tl.load(here + 1, mask=is_there, other=0.0) / count - mean
        # doi:10.2307/2683386: squared deviations within the chunk, plus the deviation of its mean from the overall mean
        spread += tl.where(is_there, within + count * apart * apart, 0.0)
    out = out_SL + tl.load(columns_L + tensor)
    tl.store(out, (tl.sqrt(tl.sum(squares)) * factor).to(tl.float32))
    largest = tl.max(absmax).to(tl.float64, bitcast=True)
    tl.store(out + stride, (largest * factor).to(tl.float32))
    tl.store(out + 2 * stride, (mean * factor).to(tl.float32))
    tl.store(out + 3 * stride, (tl.sqrt(tl.sum(spread) / n) * factor).to(tl.float32))
    tl.store(out + 4 * stride, (tl.sum(zeros) / n).to(tl.float32))
    tl.store(out + 5 * stride, tl.sum(ill).to(tl.float32))
