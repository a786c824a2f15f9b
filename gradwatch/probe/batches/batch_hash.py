"""Hash a batch of inputs, to recognize a batch that repeats."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import sync
from gradwatch.probe.device.torch_reduce import stored_values
from gradwatch.probe.graph.graph import signed

MASK_64 = (1 << 64) - 1
GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads consecutive positions over all bits
_HALF_MASK = 0xFFFFFFFF
_DEPTH = 16  # levels of nesting that are read: lists may refer to each other in circles
_PROGRAM = (ModuleType, type, FunctionType, MethodType, torch.nn.Module, torch.optim.Optimizer)  # no data of a batch
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


def hash_batch(inputs: Any, *, kernel: kernels.Kernel = "auto") -> int:
    """Hash all data of a batch, in order.

    Args:
        inputs: Tensors, arrays and plain values, nested in lists, tuples, mappings and objects with attributes.
        kernel: Backend that reads tensors on the CPU.

    Returns:
        A number below 2^48, which a float64 holds exactly. Equal data have equal hashes, on every device. Unequal data
        collide once in about 2^32 at worst. Waits for the device if a tensor is not on the CPU.
    """
    known = native_hash(inputs, kernel=kernel)
    return joined(_on_host(checksums(inputs, kernel=kernel))) if known is None else known


def native_hash(inputs: Any, *, kernel: kernels.Kernel = "auto") -> int | None:
    """Return the hash of a batch, if the extension can read the batch in place; otherwise None."""
    native = kernels.select_backend(kernel)
    return None if native is None else native.batch_hash(inputs)


def checksums(inputs: Any, *, kernel: kernels.Kernel = "auto") -> list[int | torch.Tensor]:
    """Return the checksums of all data of a batch, in order; a tensor's checksum may be on the tensor's device."""
    native = kernels.select_backend(kernel)
    parts: list[int | torch.Tensor] = []
    for leaf in _leaves(inputs, _DEPTH, set()):
        if isinstance(leaf, torch.Tensor):
            checksum = native.checksum(leaf) if native is not None else None  # None again if it cannot read the tensor
            parts.append(_checksum(leaf) if checksum is None else checksum)
        else:
            parts.append(zlib.crc32(repr(leaf).encode()))
    return parts


def is_finite(inputs: Any) -> bool:
    """Return whether all tensors of a batch, nested as in `hash_batch`, are finite."""
    return all(sync.to_float(torch.isfinite(values).all()) for values in _numbers(tensors(inputs)))


def tensors(inputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, nested as in `hash_batch`, in order."""
    return (leaf for leaf in _leaves(inputs, _DEPTH, set()) if isinstance(leaf, torch.Tensor))


def joined(parts: Sequence[int]) -> int:
    """Return the hash of a batch from its checksums."""
    # the extension computes the same in `hash_part` and `read_batch` of csrc/batch_hash.h
    total = len(parts)
    for part in parts:
        total = (total ^ total >> 29) * GOLDEN_64 + (part & MASK_64) & MASK_64
    total = (total ^ total >> 32) * GOLDEN_64 & MASK_64
    return (total ^ total >> 29) * GOLDEN_64 >> 16 & 0xFFFF_FFFF_FFFF


def finite_flag(inputs: Any, device: torch.device) -> torch.Tensor | None:
    """Return whether all tensors of a batch on a device are finite, as a flag there; None without such tensors."""
    leaves = (leaf for leaf in tensors(inputs) if leaf.device == device)
    flags = [_is_finite(values) for values in _numbers(leaves)]
    return torch.stack(flags).all() if flags else None


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether all of some plain values are finite, as a flag on their device."""
    flag = None
    if values.is_cuda and values.itemsize > 1:
        flag = kernels.attempt_triton(lambda triton: triton.is_finite(values))
    return torch.isfinite(values).all() if flag is None else flag


def _numbers(leaves: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the stored values of the tensors that may hold NaN or Inf; few operations accept a sparse tensor."""
    return (stored_values(leaf) for leaf in leaves if leaf.is_floating_point() or leaf.is_complex())


def _leaves(inputs: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield tensors and plain values of a nested batch, in order.

    Args:
        inputs: The batch, or a part of it.
        depth: Levels of nesting to read.
        seen: The `id` of each object that was read: a trainer may pass a state that refers to itself in many places.
    """
    children: Iterable[Any] = ()
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biufc":
        yield torch.from_numpy(np.ascontiguousarray(inputs))
    elif isinstance(inputs, torch.Tensor) and inputs.is_nested:
        children = inputs.unbind()
    elif isinstance(inputs, torch.Tensor) and inputs.is_quantized:
        yield inputs.int_repr()  # reading the bytes of a quantized tensor ends the process
    elif isinstance(inputs, (torch.Tensor, *_PLAIN)):
        yield inputs
    elif isinstance(inputs, Mapping):
        children = (part for item in inputs.items() for part in item)  # keys count, too
    elif isinstance(inputs, (list, tuple)):
        children = inputs
    elif not isinstance(inputs, _PROGRAM) and id(inputs) not in seen:
        seen.add(id(inputs))
        children = _attributes(inputs)  # an object of a class, such as a batch of a graph library
    for child in children if depth else ():
        yield from _leaves(child, depth - 1, seen)


def _attributes(part: object) -> Iterator[Any]:
    """Yield the values of an object's attributes, in its dictionary and in the slots of its classes."""
    kind: Any = type(part)  # mypy: the type of an object may not be hashable
    yield from getattr(part, "__dict__", {}).values()
    for slot in _slots(kind):
        with suppress(AttributeError):  # the slot is empty
            yield slot.__get__(part)


@lru_cache(maxsize=256)  # a batch may be a list of many objects of a class
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    slots = (value for owner in kind.__mro__ for value in vars(owner).values())
    return tuple(slot for slot in slots if isinstance(slot, MemberDescriptorType))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bytes in row-major order, as one int64 on its device.

    The result equals `checksum_of` in `csrc/`: each 64-bit word, keyed by its position, gives the product of its
    halves.
    """
    tensor = tensor.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    # lazy conjugation and negation are not in the bytes
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
    num_bytes = data.numel()
    if num_bytes % 8 or data.data_ptr() % 8:  # a clone has its own storage, aligned as the view needs it
        data = torch.nn.functional.pad(data, (0, -num_bytes % 8)).clone()
    words = data.view(torch.int64)
    total = None
    if words.is_cuda:
        total = kernels.attempt_triton(lambda triton: triton.sum_words(words, golden=signed(GOLDEN_64)))
    return (_sum_words(words) if total is None else total) + signed(num_bytes * GOLDEN_64 & MASK_64)


def _sum_words(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of 64-bit words, keyed by their positions, by torch operations."""
    positions = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    keyed = words ^ (positions * signed(GOLDEN_64))
    products = (keyed & _HALF_MASK) * ((keyed >> 32) & _HALF_MASK)
    return (products + words).sum()


def _on_host(parts: list[int | torch.Tensor]) -> list[int]:
    """Return all checksums as numbers, with one transfer for all that are on a device."""
    pending = [part for part in parts if isinstance(part, torch.Tensor)]
    arrived = iter(sync.to_ints(torch.stack([part.to(pending[0].device) for part in pending])) if pending else ())
    return [next(arrived) if isinstance(part, torch.Tensor) else part for part in parts]
