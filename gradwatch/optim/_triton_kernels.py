"""Optimizer steps in Triton, for all parameters of a group in one launch, with what is summed on the way."""

# C = chunks of all tensors, P = parameters of a group, F = what is told of a chunk; see probe/_triton_kernels.py

from __future__ import annotations

import triton
import triton.language as tl

from gradwatch.probe._triton_kernels import describe


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def step_chunks(
    addresses_5P: tl.tensor,  # of weights, gradients, and moments: momentum or the first, the second, its maximum
    numels_P: tl.tensor,
    tensors_C: tl.tensor,
    offsets_C: tl.tensor,
    steps_2P: tl.tensor,  # Adam: the step's size, and the square root of the second moment's correction
    num_params: tl.tensor,
    found_CF: tl.tensor,
    changed_2C: tl.tensor,
    num_chunks: tl.tensor,
    scale: tl.tensor,
    sign: tl.tensor,
    decay: tl.tensor,
    keep: tl.tensor,
    first: tl.tensor,  # Adam: the gradient's part of the first moment; SGD: momentum
    second: tl.tensor,  # Adam: beta2; SGD: the gradient's part of the momentum
    third: tl.tensor,  # Adam: the gradient's part of the second moment; SGD: the rate
    eps: tl.tensor,
    IS_ADAM: tl.constexpr,
    IS_COUPLED: tl.constexpr,
    IS_AMSGRAD: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_FRESH: tl.constexpr,
    TELLS_GRADIENTS: tl.constexpr,
    TELLS_CHANGES: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
) -> None:
    """Step one chunk, in the order of operations of the native step."""
    chunk = tl.program_id(0)
    param = tl.load(tensors_C + chunk)
    offset = tl.load(offsets_C + chunk)
    numel = tl.load(numels_P + param)
    places = offset + tl.arange(0, SIZE)
    is_there = places < numel
    table = addresses_5P + param
    w_at = tl.load(table).to(tl.pointer_type(tl.float32)) + places
    g_at = tl.load(table + num_params).to(tl.pointer_type(tl.float32)) + places
    w = tl.load(w_at, mask=is_there, other=0.0)
    g = tl.load(g_at, mask=is_there, other=0.0)
    if HAS_SCALE:
        g = tl.div_rn(g, tl.zeros_like(g) + tl.load(scale))
        tl.store(g_at, g, mask=is_there)
    if TELLS_GRADIENTS:
        describe(g, is_there, tl.minimum(numel - offset, SIZE), found_CF + chunk * NUM_FIELDS, False, False)
    x = g * sign
    if IS_COUPLED:
        x = tl.fma(w, tl.zeros_like(w) + decay, x)
    if IS_ADAM:
        m_at = tl.load(table + 2 * num_params).to(tl.pointer_type(tl.float32)) + places
        v_at = tl.load(table + 3 * num_params).to(tl.pointer_type(tl.float32)) + places
        m = tl.load(m_at, mask=is_there, other=0.0)
        v = tl.load(v_at, mask=is_there, other=0.0)
        is_small = first < 0.5
        m = tl.fma(tl.zeros_like(x) + tl.where(is_small, first, first - 1), x - m, tl.where(is_small, m, x))
        v = tl.fma(third * x, x, v * second)
        tl.store(m_at, m, mask=is_there)
        tl.store(v_at, v, mask=is_there)
        if IS_AMSGRAD:
            top_at = tl.load(table + 4 * num_params).to(tl.pointer_type(tl.float32)) + places
            top = tl.load(top_at, mask=is_there, other=0.0)
            v = tl.where((top > v) | (top != top), top, v)
            tl.store(top_at, v, mask=is_there)
        size = tl.load(steps_2P + param)
        root = tl.load(steps_2P + num_params + param)
        below = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps
        after = (w if IS_COUPLED else w * keep) - tl.div_rn(size * m, below)
    else:
        if HAS_MOMENTUM:
            m_at = tl.load(table + 2 * num_params).to(tl.pointer_type(tl.float32)) + places
            if IS_FRESH:
                m = x
            else:
                m = tl.load(m_at, mask=is_there, other=0.0)
                m = tl.fma(x, tl.zeros_like(x) + second, m * first)
            tl.store(m_at, m, mask=is_there)
            x = tl.fma(m, tl.zeros_like(x) + first, x) if IS_NESTEROV else m
        after = tl.fma(x, tl.zeros_like(x) - third, w)
    tl.store(w_at, after, mask=is_there)
    if TELLS_CHANGES:
        old = w.to(tl.float64)
        moved = tl.where(is_there, after.to(tl.float64) - old, 0.0)
        tl.store(changed_2C + chunk, tl.sum(old * old))
        tl.store(changed_2C + num_chunks + chunk, tl.sum(moved * moved))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_changes(
    changed_2C: tl.tensor,
    num_chunks: tl.tensor,
    begins_P: tl.tensor,
    columns_P: tl.tensor,
    out_2L: tl.tensor,
    stride: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> None:
    """Write the norm of one weight, and that of its update divided by it."""
    param = tl.program_id(0)
    begin = tl.load(begins_P + param)
    end = tl.load(begins_P + param + 1)
    lanes = tl.arange(0, AT_ONCE)
    weights = tl.zeros((AT_ONCE,), tl.float64)
    updates = tl.zeros((AT_ONCE,), tl.float64)
    for at in range(begin, end, AT_ONCE):
        is_there = at + lanes < end
        weights += tl.load(changed_2C + at + lanes, mask=is_there, other=0.0)
        updates += tl.load(changed_2C + num_chunks + at + lanes, mask=is_there, other=0.0)
    weight = tl.sum(weights)
    ratio = tl.sqrt(tl.sum(updates) / weight)
    out = out_2L + tl.load(columns_P + param)
    tl.store(out, tl.sqrt(weight).to(tl.float32))
    tl.store(out + stride, tl.where(ratio <= 3.4028234663852886e38, ratio, float("nan")).to(tl.float32))
