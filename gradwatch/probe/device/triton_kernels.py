"""Read many tensors in one launch with Triton kernels; imported only with a GPU and Triton."""

# C = chunks of all tensors, L = tensors, F = fields of a chunk, S = statistics
#
# tensors are cut into chunks: each program reads one chunk and writes its fields to a separate row, and another launch
# adds up the chunks of each tensor in order, so the result does not depend on the order of the programs; magnitudes
# compare as integers, as on the CPU: NaN is above Inf, and subnormal values are not zero even if the GPU flushes them

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 8192
WARPS = 8  # that read a chunk
FIELDS = 7  # scale; divided by it: sum, squares, squares from the mean; then largest magnitude, zeros, non-finite
ABREAST = 1024  # chunks that one program adds up at a time
ALIGNMENT = 16  # bytes: a thread then reads several values at once


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def widened(x: tl.tensor, IS_BRAIN: tl.constexpr) -> tl.tensor:
    """Return values as float32. A bfloat16 comes as the integer with its bits."""
    # a bfloat16 is the upper half of a float32, also if it is subnormal
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if IS_BRAIN else x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load(data: tl.tensor, count: tl.tensor, SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the next values, 0 past the end, and which of them are there."""
    lanes = tl.arange(0, SIZE)
    is_there = lanes < count
    # a mask would keep a thread from reading several values at once
    if count == SIZE:  # noqa: SIM108 - older versions of Triton cannot compile a conditional expression
        x = tl.load(data + lanes)
    else:
        x = tl.load(data + lanes, mask=is_there, other=0)
    return x, is_there


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
        is_non_finite = magnitude >= 0x7FF0000000000000
        absmax = largest.to(tl.float64, bitcast=True)
    else:
        x = widened(x, IS_BRAIN)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitude)
        is_non_finite = magnitude >= 0x7F800000
        absmax = largest.to(tl.float32, bitcast=True)
    # both counts in one reduction: a chunk has less than 2^15 values
    counts = tl.sum(is_non_finite.to(tl.int32) * 65536 + (is_there & (magnitude == 0)).to(tl.int32))
    non_finite, zeros = counts >> 16, counts & 0xFFFF
    # the squares of huge and tiny values leave the range of a float, so values are scaled by a power of two, without
    # rounding: by the exponent of the largest, but by 2^100 next to an Inf, where finite values must not become Inf
    if IS_DOUBLE:
        exponent = tl.where(non_finite == 0, tl.minimum(tl.maximum(largest >> 52, 1), 2045), 1123)
        scale = (exponent << 52).to(tl.float64, bitcast=True)
        y = x * ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = tl.where(non_finite == 0, tl.minimum(tl.maximum(largest >> 23, 1), 253), 227)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        y = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    mean = tl.sum(y) / count
    away = tl.where(is_there, y - mean, 0.0)  # padding is 0, not the mean
    tl.store(out, scale.to(tl.float64))
    tl.store(out + 1, tl.sum(y).to(tl.float64))
    tl.store(out + 2, tl.sum(y * y).to(tl.float64))
    tl.store(out + 3, tl.sum(away * away).to(tl.float64))
    tl.store(out + 4, absmax.to(tl.float64))
    tl.store(out + 5, zeros.to(tl.float64))
    tl.store(out + 6, non_finite.to(tl.float64))


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
    IS_ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
) -> None:
    """Sum up one chunk in the precision of its values, scaled to magnitudes of about 1."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors_C + chunk)
    offset = tl.load(offsets_C + chunk)
    data = tl.load(addresses_L + tensor).to(tl.pointer_type(ELEMENT)) + offset
    if IS_ALIGNED:
        data = tl.multiple_of(data, 16)
    count = tl.minimum(tl.load(numels_L + tensor) - offset, SIZE).to(tl.int32)
    x, is_there = load(data, count, SIZE)
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
    non_finite = tl.zeros((AT_ONCE,), tl.float64)
    absmax = tl.zeros((AT_ONCE,), tl.int64)  # as bits, in which NaN is the largest
    first = begin
    while first < end:  # `range` needs integers in the interpreter
        here = found_CF + (first + lanes) * NUM_FIELDS
        is_there = first + lanes < end
        scale = tl.load(here, mask=is_there, other=0.0)
        total += scale * tl.load(here + 1, mask=is_there, other=0.0)
        squares += scale * scale * tl.load(here + 2, mask=is_there, other=0.0)
        found = tl.load(here + 4, mask=is_there, other=0.0)
        absmax = tl.maximum(absmax, found.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF)
        zeros += tl.load(here + 5, mask=is_there, other=0.0)
        non_finite += tl.load(here + 6, mask=is_there, other=0.0)
        first += AT_ONCE
    mean = tl.sum(total) / n
    # a second loop: deviations need the mean of all chunks
    spread = tl.zeros((AT_ONCE,), tl.float64)
    first = begin
    while first < end:
        here = found_CF + (first + lanes) * NUM_FIELDS
        is_there = first + lanes < end
        scale = tl.load(here, mask=is_there, other=0.0)
        within = scale * scale * tl.load(here + 3, mask=is_there, other=0.0)
        count = tl.minimum(numel - (first + lanes - begin) * SIZE, SIZE).to(tl.float64)
        apart = scale * tl.load(here + 1, mask=is_there, other=0.0) / count - mean
        # doi:10.2307/2683386: squared deviations within the chunk, plus the deviation of its mean from the overall mean
        spread += tl.where(is_there, within + count * apart * apart, 0.0)
        first += AT_ONCE
    out = out_SL + tl.load(columns_L + tensor)
    tl.store(out, (tl.sqrt(tl.sum(squares)) * factor).to(tl.float32))
    largest = tl.max(absmax).to(tl.float64, bitcast=True)
    tl.store(out + stride, (largest * factor).to(tl.float32))
    tl.store(out + 2 * stride, (mean * factor).to(tl.float32))
    tl.store(out + 3 * stride, (tl.sqrt(tl.sum(spread) / n) * factor).to(tl.float32))
    tl.store(out + 4 * stride, (tl.sum(zeros) / n).to(tl.float32))
    tl.store(out + 5 * stride, tl.sum(non_finite).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def count_bins(
    data: tl.tensor,
    numel: tl.tensor,
    out_B: tl.tensor,
    IS_BRAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    LOWEST: tl.constexpr,
    SIDE: tl.constexpr,
    TABLE: tl.constexpr,
    NUM_BINS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Add the histogram of one chunk to its tensor's. NaN and padding count in the last bin of `TABLE`."""
    offset = tl.program_id(0).to(tl.int64) * SIZE
    count = tl.minimum(numel - offset, SIZE).to(tl.int32)
    x, is_there = load(data + offset, count, SIZE)
    bits = widened(x, IS_BRAIN).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    steps = tl.minimum(tl.maximum((magnitude >> SHIFT) - (LOWEST - 1), 0), SIDE)
    bins = tl.where(bits < 0, SIDE - steps, SIDE + steps)
    counts = tl.histogram(tl.where(is_there & (magnitude <= 0x7F800000), bins, TABLE - 1), TABLE)
    indices = tl.arange(0, TABLE)
    tl.atomic_add(out_B + indices, counts.to(tl.int64), mask=(indices < NUM_BINS) & (counts > 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sum_words(words: tl.tensor, number: tl.tensor, out_C: tl.tensor, GOLDEN: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Write the sum of the 64-bit words of one chunk, each keyed by its position, as `csrc/kernels/counts.h` has it."""
    chunk = tl.program_id(0)
    offset = chunk.to(tl.int64) * SIZE
    word, is_there = load(words + offset, tl.minimum(number - offset, SIZE).to(tl.int32), SIZE)
    keyed = word ^ ((offset + tl.arange(0, SIZE) + 1) * GOLDEN)
    product = (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF)
    tl.store(out_C + chunk, tl.sum(tl.where(is_there, product + word, 0)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def find_non_finite(
    data: tl.tensor, numel: tl.tensor, out_C: tl.tensor, EXPONENT: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Write whether one chunk, of integers with the bits of the values, has a NaN or Inf: all bits of `EXPONENT`."""
    chunk = tl.program_id(0)
    offset = chunk.to(tl.int64) * SIZE
    bits, _ = load(data + offset, tl.minimum(numel - offset, SIZE).to(tl.int32), SIZE)
    tl.store(out_C + chunk, tl.max(((bits & EXPONENT) == EXPONENT).to(tl.int32)))
