"""Optimizer steps in Triton, for all parameters of a group in one launch, with what is summed on the way."""

# C = chunks of all tensors, P = parameters of a group, F = what is told of a chunk; see probe/device/triton_kernels.py

from __future__ import annotations

import triton
import triton.language as tl

from gradwatch.probe.device.triton_kernels import describe, locate


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def of_param(addresses_6P: tl.tensor, row: tl.constexpr, num_params: tl.tensor, param: tl.tensor) -> tl.tensor:
    """Return where a row of the table says that something of a parameter begins."""
    return tl.load(addresses_6P + row * num_params + param).to(tl.pointer_type(tl.float32))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def adam(
    w: tl.tensor,
    x: tl.tensor,
    places: tl.tensor,
    is_there: tl.tensor,
    moves: tl.tensor,
    addresses_6P: tl.tensor,
    num_params: tl.tensor,
    param: tl.tensor,
    keep: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    eps: tl.tensor,
    rate: tl.tensor,
    log_first: tl.tensor,
    log_second: tl.tensor,
    IS_COUPLED: tl.constexpr,
    IS_AMSGRAD: tl.constexpr,
) -> tl.tensor:
    """Return the weights after a step of Adam, and move its moments."""
    m_at = of_param(addresses_6P, 2, num_params, param) + places
    v_at = of_param(addresses_6P, 3, num_params, param) + places
    m = tl.load(m_at, mask=is_there, other=0.0)
    v = tl.load(v_at, mask=is_there, other=0.0)
    is_small = first < 0.5
    m = tl.fma(tl.zeros_like(x) + tl.where(is_small, first, first - 1), x - m, tl.where(is_small, m, x))
    v = tl.fma(third * x, x, v * second)
    tl.store(m_at, m, mask=moves)
    tl.store(v_at, v, mask=moves)
    if IS_AMSGRAD:
        top_at = of_param(addresses_6P, 4, num_params, param) + places
        top = tl.load(top_at, mask=is_there, other=0.0)
        v = tl.where((top > v) | (top != top), top, v)
        tl.store(top_at, v, mask=moves)
    count = tl.load(of_param(addresses_6P, 5, num_params, param)).to(tl.float64) + 1
    size = (rate / (1 - tl.exp2(count * log_first))).to(tl.float32)
    root = tl.sqrt(1 - tl.exp2(count * log_second)).to(tl.float32)
    below = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps
    return (w if IS_COUPLED else w * keep) - tl.div_rn(size * m, below)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sgd(
    w: tl.tensor,
    x: tl.tensor,
    places: tl.tensor,
    is_there: tl.tensor,
    moves: tl.tensor,
    addresses_6P: tl.tensor,
    num_params: tl.tensor,
    param: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    IS_NESTEROV: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    IS_FRESH: tl.constexpr,
) -> tl.tensor:
    """Return the weights after a step of SGD, and move its momentum."""
    if HAS_MOMENTUM:
        m_at = of_param(addresses_6P, 2, num_params, param) + places
        m = x
        if not IS_FRESH:
            m = tl.load(m_at, mask=is_there, other=0.0)
            m = tl.fma(x, tl.zeros_like(x) + second, m * first)
        tl.store(m_at, m, mask=moves)
        x = tl.fma(m, tl.zeros_like(x) + first, x) if IS_NESTEROV else m
    return tl.fma(x, tl.zeros_like(x) - third, w)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tell_change(w: tl.tensor, after: tl.tensor, is_there: tl.tensor, out: tl.tensor, stride: tl.tensor) -> None:
    """Write the sums of squares of weights and of their updates."""
    old = w.to(tl.float64)
    moved = tl.where(is_there, after.to(tl.float64) - old, 0.0)
    tl.store(out, tl.sum(old * old))
    tl.store(out + stride, tl.sum(moved * moved))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def step_chunks(
    addresses_6P: tl.tensor,  # of weights, gradients, moments (momentum or the first, the second, its maximum), counts
    numels_P: tl.tensor,
    tensors_C: tl.tensor,
    offsets_C: tl.tensor,
    num_params: tl.tensor,
    found_CF: tl.tensor,
    changed_2C: tl.tensor,
    num_chunks: tl.tensor,
    scale: tl.tensor,
    found_inf: tl.tensor,
    sign: tl.tensor,
    decay: tl.tensor,
    keep: tl.tensor,
    first: tl.tensor,  # Adam: the gradient's part of the first moment; SGD: momentum
    second: tl.tensor,  # Adam: beta2; SGD: the gradient's part of the momentum
    third: tl.tensor,  # Adam: the gradient's part of the second moment; SGD: the rate
    eps: tl.tensor,
    rate: tl.tensor,  # of Adam, as the next two: the binary logarithms of its betas
    log_first: tl.tensor,
    log_second: tl.tensor,
    IS_ADAM: tl.constexpr,
    IS_COUPLED: tl.constexpr,
    IS_AMSGRAD: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    MAY_SKIP: tl.constexpr,
    IS_FRESH: tl.constexpr,
    TELLS_GRADIENTS: tl.constexpr,
    TELLS_CHANGES: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
) -> None:
    """Step one chunk, in the order of operations of the native step; where `found_inf` is set, only look at it."""
    chunk, param, places, is_there, count = locate(tensors_C, offsets_C, numels_P, SIZE)
    moves = is_there
    if MAY_SKIP:
        moves = is_there & (tl.zeros((SIZE,), tl.float32) + tl.load(found_inf) == 0)
    w_at = of_param(addresses_6P, 0, num_params, param) + places
    g_at = of_param(addresses_6P, 1, num_params, param) + places
    w = tl.load(w_at, mask=is_there, other=0.0)
    g = tl.load(g_at, mask=is_there, other=0.0)
    if HAS_SCALE:
        g = tl.div_rn(g, tl.zeros_like(g) + tl.load(scale))
        tl.store(g_at, g, mask=moves)
    if TELLS_GRADIENTS:
        describe(g, is_there, count, found_CF + chunk * NUM_FIELDS, False, False)
    x = g * sign
    if IS_COUPLED:
        x = tl.fma(w, tl.zeros_like(w) + decay, x)
    if IS_ADAM:
        after = adam(
            w, x, places, is_there, moves, addresses_6P, num_params, param, keep, first, second, third, eps, rate,
            log_first, log_second, IS_COUPLED, IS_AMSGRAD,
        )  # fmt: skip
    else:
        after = sgd(
            w, x, places, is_there, moves, addresses_6P, num_params, param, first, second, third, IS_NESTEROV,
            HAS_MOMENTUM, IS_FRESH,
        )  # fmt: skip
    tl.store(w_at, after, mask=moves)
    if TELLS_CHANGES:
        tell_change(w, after, is_there, changed_2C + chunk, num_chunks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_changes(
    changed_2C: tl.tensor,
    num_chunks: tl.tensor,
    begins_P: tl.tensor,
    columns_P: tl.tensor,
    out_2L: tl.tensor,
    stride: tl.tensor,
    found_inf: tl.tensor,
    MAY_SKIP: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Write the norm of one weight, and that of its update divided by it; nan where the step was skipped."""
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
    if MAY_SKIP:
        weight = tl.where(tl.load(found_inf) == 0, weight, float("nan"))
    ratio = tl.sqrt(tl.sum(updates) / weight)
    out = out_2L + tl.load(columns_P + param)
    tl.store(out, tl.sqrt(weight).to(tl.float32))
    tl.store(out + stride, tl.where(ratio <= 3.4028234663852886e38, ratio, float("nan")).to(tl.float32))
