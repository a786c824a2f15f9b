"""Tell a gradient that was added to, or scaled as a whole, from one that something else was written over."""

# N = numbers of a sample

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import is_capturing, to_host

SAMPLE_NUMBERS = 32
"""Leading numbers that are compared: mostly of one row, which scales and clips leave in order."""

LEAST_NUMBERS = 8
"""Numbers from which the order of others would hardly be theirs: one in 40,000."""


@final
class GradientSample:
    """What a gradient was at one moment: where it lay, how often it was written to, and its leading numbers.

    Args:
        grad: The gradient, dense or sparse.
    """

    def __init__(self, grad: Tensor) -> None:
        self._place, self._version = _written(grad)
        self._numbers_N = _leading(grad)

    def is_continued_by(self, grad: Tensor) -> bool:
        """Say whether a gradient is still this one: as it was, or scaled or clipped, by norm or by value.

        Scaling and clipping keep the order of its numbers. Where too few of them are known, it is taken for the same.

        Args:
            grad: The gradient of the same parameter at a later moment.
        """
        if (self._place, self._version) == _written(grad) or is_capturing([grad]):
            return True
        now_N = _leading(grad)
        if self._numbers_N is None or now_N is None or len(now_N) != len(self._numbers_N):
            return True
        numbers_2N = to_host(torch.stack([self._numbers_N, now_N]))
        return not np.isfinite(numbers_2N).all() or _is_in_order(*numbers_2N)


def _is_in_order(before_N: NDArray[Any], now_N: NDArray[Any]) -> bool:
    """Say whether numbers are a function of others that never falls, or never rises."""
    order_N = np.argsort(before_N)
    rise_N, change_N = np.diff(before_N[order_N]), np.diff(now_N[order_N])
    has_one_value = not change_N[rise_N == 0].any()
    return bool(has_one_value and ((change_N >= 0).all() or (change_N <= 0).all()))


def _written(grad: Tensor) -> tuple[int, int]:
    """Return where a gradient lies and how often it was written to."""
    stored = grad._values() if grad.layout == torch.sparse_coo else local_part(grad)
    return stored.data_ptr(), grad._version


def _leading(grad: Tensor) -> Tensor | None:
    """Return the leading numbers of a gradient, None where it has few of them or stores them in no fixed place."""
    part = local_part(grad.detach())
    if part.layout != torch.strided or part.is_complex() or part.numel() < LEAST_NUMBERS:
        return None
    while part.ndim > 1:  # rather than flatten all of it, which may copy it
        part = part[: -(-SAMPLE_NUMBERS // max(1, part[0].numel()))].flatten(0, 1)
    return part[:SAMPLE_NUMBERS].float().clone()
