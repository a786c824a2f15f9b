"""Wait for the device: Python reads values of training tensors only in this module."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the values of a tensor as a NumPy array, waiting for the device that computes them.

    Args:
        tensor: Any shape, device and real dtype; bfloat16 becomes float32, since NumPy has no bfloat16.

    Returns:
        An array of the same shape. It shares the memory of a tensor on the CPU.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy(force=True)  # force: detach, copy to the host, resolve lazy conjugation
    return array


def to_array(values: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """Convert a tensor to a NumPy array, waiting for the device that computes it; return an array unchanged."""
    return to_host(values) if isinstance(values, torch.Tensor) else values


def to_float(tensor: torch.Tensor) -> float:
    """Return the only value of a tensor, waiting for the device that computes it."""
    return float(tensor.item())


def to_ints(tensor: torch.Tensor) -> list[int]:
    """Return the values of a one-dimensional integer tensor, waiting for the device that computes them."""
    return [int(value) for value in np.atleast_1d(to_host(tensor))]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def can_be_read(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor may be copied to the host: not while a CUDA graph is captured."""
    return tensor.is_cpu or (tensor.is_cuda and not torch.cuda.is_current_stream_capturing())


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself if it is in host memory, or a copy there, waiting for its device."""
    return tensor if is_on_host(tensor) else tensor.detach().to("cpu")


def host_value_or_copy(tensor: torch.Tensor) -> float | torch.Tensor:
    """Return the only value of a tensor in host memory; for any other tensor, a copy on its device, without waiting."""
    return to_float(tensor) if is_on_host(tensor) else tensor.detach().clone()


@final
class HostTransfer:
    """Copy tensors of one device to the host without waiting for the device.

    Args:
        tensors: By name, of any shape and real dtype, all on one device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}
        self._forms = {name: (tuple(t.shape), _numpy_dtype(t.dtype)) for name, t in tensors.items()}
        flat = torch.zeros(0, dtype=torch.uint8, device="cpu")
        if tensors:
            # one copy for all tensors: each copy has a fixed cost
            flat = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()])
        self._copy = flat.to("cpu", non_blocking=True)  # from a GPU into pinned memory, which torch's allocator reuses
        self._event = torch.cuda.Event() if flat.is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(flat.device))

    @property
    def is_ready(self) -> bool:
        """Return whether `values` would return at once."""
        return self._event is None or bool(self._event.query())

    def values(self) -> dict[str, NDArray[Any]]:
        """Return the values by name, waiting for them if they are in flight."""
        if self._event is not None and not self.is_ready:
            self._event.synchronize()
        data = to_host(self._copy)
        values, begin = {}, 0
        for name, (shape, dtype) in self._forms.items():
            count = int(np.prod(shape))
            # a copy, since the pinned memory is used again; `frombuffer` reads at any offset
            values[name] = np.frombuffer(data, dtype, count, begin).reshape(shape).copy()
            begin += count * dtype.itemsize
        return values


@final
class Arrival:
    """Values of tensors that are on their way to the host; those of tensors in host memory are there at once.

    Args:
        tensors: Of any shape and real dtype. Those that are not in host memory are on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        remote = {str(i): t for i, t in enumerate(tensors) if not is_on_host(t)}
        self._transfer = HostTransfer(remote) if remote else None

    @property
    def is_ready(self) -> bool:
        """Return whether `values` would return at once."""
        return self._transfer is None or self._transfer.is_ready

    def values(self) -> list[NDArray[Any]]:
        """Return the values of each tensor, waiting for those that are on their way."""
        arrived = self._transfer.values() if self._transfer else {}
        return [arrived[str(i)] if str(i) in arrived else to_host(t) for i, t in enumerate(self._tensors)]


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return to_host(torch.empty(0, dtype=dtype, device="cpu")).dtype


def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a table of integers on a device, int64; the host does not wait for the copy.

    The newest tables are cached: a table that stays the same from step to step is copied once. A CUDA graph repeats the
    copy with every replay, so its table on the host is never freed.

    Args:
        numbers: The integers, which are the key of the cache.
        device: Device of the table.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _table(numbers, device)[1]
    _CAPTURED.append(_table.__wrapped__(numbers, device))
    return _CAPTURED[-1][1]


_CAPTURED: list[tuple[torch.Tensor, torch.Tensor]] = []


@functools.lru_cache(maxsize=64)
def _table(numbers: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # the table on the host is returned, too, so that it lives as long as the copy may take
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory()  # from other memory, the host would wait for the copy
    return table, table.to(device, non_blocking=True)


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor of the host on a device; the host does not wait for it.

    A CUDA graph repeats the copy with every replay, as in `on_device`.
    """
    # torch's allocator keeps pinned memory until a copy is done
    table = table.pin_memory() if device.type == "cuda" else table
    copy = table.to(device, non_blocking=True)
    if is_capturing([copy]):
        _CAPTURED.append((table, copy))
    return copy


def is_capturing(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether operations on tensors are being captured into a CUDA graph."""
    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
