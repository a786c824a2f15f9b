"""The one place where the host waits for the device: each value of a training tensor that Python sees comes by here."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's values as a NumPy array, waiting for the device that computes them.

    Args:
        tensor: Any shape, device and real dtype; bfloat16 becomes float32, which NumPy knows.

    Returns:
        An array of the same shape. It shares the tensor's memory where that is on the CPU.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy(force=True)
    return array


def to_float(tensor: torch.Tensor) -> float:
    """Return the only value of a tensor, waiting for the device that computes it."""
    return float(tensor.item())


def to_ints(tensor: torch.Tensor) -> list[int]:
    """Return the values of a one-dimensional integer tensor, waiting for the device that computes them."""
    return [int(value) for value in np.atleast_1d(to_host(tensor))]


def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a table of integers on a device, int64; the host does not wait for the copy.

    The newest tables are kept, so that what stays the same from step to step is copied once. In a CUDA graph a copy is
    made again with every replay, so the table on the host is kept for good.
    """
    if not _is_capturing(device):
        return _table(numbers, device)[1]
    _CAPTURED.append(_table.__wrapped__(numbers, device))
    return _CAPTURED[-1][1]


_CAPTURED: list[tuple[torch.Tensor, torch.Tensor]] = []


@functools.lru_cache(maxsize=64)
def _table(numbers: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table on the host and its copy on a device."""
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory()  # from other memory, the host would wait for the copy
    return table, table.to(device, non_blocking=True)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
