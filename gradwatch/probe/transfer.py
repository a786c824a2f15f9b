"""The one place where the host waits for the device: each value of a training tensor that Python sees comes by here."""

from __future__ import annotations

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
