"""Distinguish a gradient that was added to or scaled from one that was overwritten."""

# N = numbers of a sample

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import is_capturing

SAMPLE_NUMBERS = 32
"""Number of leading numbers to compare, mostly of one row. Scaling and clipping keep their order."""

MIN_NUMBERS = 8
"""Minimum number of numbers: unrelated ones have the same order in 1 of 40,000 cases."""


@final
class GradientSample:
    """A gradient at one moment: its address, its version counter, and its leading numbers.

    Args:
        grad: The gradient, dense or sparse.
    """

    def __init__(self, grad: Tensor) -> None:
        self._address, self._version = last_write(grad)
        self._numbers_N = _leading(grad)

    def numbers_with(self, grad: Tensor) -> Tensor | None:
        """Return the numbers of this gradient and of a later one of the same parameter, for `is_continued`.

        Args:
            grad: The gradient at the later moment.

        Returns:
            Tensor of shape (2, N), on the device of the gradient, which the host need not wait for. None if it is
            still this one: nothing has written to it, or it has too few numbers to tell.
        """
        if (self._address, self._version) == last_write(grad) or is_capturing([grad]):
            return None
        now_N = _leading(grad)
        if self._numbers_N is None or now_N is None or len(now_N) != len(self._numbers_N):
            return None
        return torch.stack([self._numbers_N, now_N])


def is_continued(numbers_2N: NDArray[Any]) -> bool:
    """Return whether a gradient is still the earlier one: scaled or clipped, by norm or by value, which keep the order.

    Args:
        numbers_2N: Result of `GradientSample.numbers_with`.
    """
    # NaN and Inf have no order to compare
    return not np.isfinite(numbers_2N).all() or _is_in_order(*numbers_2N)


def _is_in_order(before_N: NDArray[Any], now_N: NDArray[Any]) -> bool:
    """Return whether numbers are a monotonic function of others."""
    order_N = np.argsort(before_N)
    rise_N, change_N = np.diff(before_N[order_N]), np.diff(now_N[order_N])
    has_one_value = not change_N[rise_N == 0].any()
    # clipping by value makes numbers equal; a negative scale reverses the order
    return bool(has_one_value and ((change_N >= 0).all() or (change_N <= 0).all()))


def last_write(grad: Tensor) -> tuple[int, int]:
    """Return the address and the version of a gradient, which each write changes; no device is waited for."""
    # a sparse gradient has no address
    stored = grad._values() if grad.layout == torch.sparse_coo else local_part(grad)
    return stored.data_ptr(), grad._version


def _leading(grad: Tensor) -> Tensor | None:
    """Return the leading numbers of a gradient, or None if it has few of them or no fixed storage."""
    part = local_part(grad).detach()
    if part.layout != torch.strided or part.is_complex() or part.numel() < MIN_NUMBERS:
        return None
    while part.ndim > 1:  # rather than flatten all of it, which may copy it
        part = part[: -(-SAMPLE_NUMBERS // max(1, part[0].numel()))].flatten(0, 1)
    return part[:SAMPLE_NUMBERS].float().clone()
