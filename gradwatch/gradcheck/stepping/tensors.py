"""Widen tensors to float64 with their strides, and take products and norms of any dtype and layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradwatch.probe.device.sync import to_float

MIN_SCALE, MAX_SCALE = 1e-2, 1.0
"""Limits of the root mean square of a tensor as the unit of a step: of a bias of zeros, and of a large offset."""


def is_continuous(tensor: Tensor) -> bool:
    """Return whether a tensor has a gradient: a real or complex floating-point format."""
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a detached copy in float64 or complex128, with the strides of the original.

    Args:
        tensor: Any dtype; integers are copied as they are.
        dtype: Real format of the copy.
    """
    source = tensor.detach()
    target = (dtype.to_complex() if source.is_complex() else dtype) if is_continuous(source) else source.dtype
    if source.layout != torch.strided or source.is_contiguous() or source.numel() == 0:
        return source.to(target, copy=True)
    last = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    memory = source.as_strided((last + 1,), (1,))  # the copy of a view has the gaps of the view
    return memory.to(target, copy=True).as_strided(source.shape, source.stride(), 0)


def copied(value: Any) -> Any:
    """Return a nested value with every tensor replaced by a detached copy with the same strides."""
    return tree_map_only(Tensor, lambda t: _copy(t), value)


def _copy(tensor: Tensor) -> Tensor:
    real = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    return widened(tensor, real) if is_continuous(tensor) else tensor.detach().clone()


def scale_of(tensor: Tensor) -> float:
    """Return the unit of a step along a tensor: its root mean square, within limits."""
    if not tensor.numel():
        return 1.0
    rms = norm(tensor) / math.sqrt(tensor.numel())
    return min(max(rms, MIN_SCALE), MAX_SCALE) if math.isfinite(rms) else 1.0


def inner(a: Tensor, b: Tensor) -> float:
    """Return the real inner product; for complex tensors, the one that defines torch's gradients."""
    a, b = a.detach(), b.detach()
    if a.is_complex() or b.is_complex():
        return to_float((a.conj() * b).real.double().sum())
    return to_float((a.double() * b.double()).sum())


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm as a number."""
    return to_float(torch.linalg.vector_norm(tensor.detach())) if tensor.numel() else 0.0


def dense(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as a detached dense copy; zeros for None."""
    if grad is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    grad = grad.detach()
    return (grad if grad.layout == torch.strided else grad.to_dense()).clone()


def random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normally distributed numbers of the shape, device and dtype of a tensor."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(tensor.shape, generator=generator, dtype=dtype).to(tensor)
