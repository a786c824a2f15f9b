"""Compute the statistics of a step on the host: losses, batch size, peak memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.attempts import Attempts
from gradwatch.monitor.best_effort import best_effort
from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import to_float

resource: ModuleType | None
try:
    import resource
except ImportError:  # not on Windows
    resource = None

NORM_TOLERANCE = 1e-5  # relative: total norms of the same gradients differ by less, in any order of summation
MEMORY_INTERVAL_S = 1.0  # between two readings of the peak memory; each moves a step to the full path, 0.3 ms
RSS_UNIT_BYTES = (
    1 if sys.platform == "darwin" else 1024
)  # getrusage(2): ru_maxrss is in bytes on macOS, in KiB on Linux


def to_number(value: Tensor | float | None) -> float:
    """Return a value as a float: the mean of a tensor with several values, nan for None."""
    if isinstance(value, Tensor):
        value = local_part(value)  # never wait for another process
        # float first: a mean is rounded to the dtype of its tensor, and integers have no mean
        return to_float(value if value.numel() == 1 else value.detach().float().mean())
    return math.nan if value is None else float(value)


def num_samples(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch, or None if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for part in parts if (n := num_samples(part)) is not None), None)


def peak_memory(device: torch.device | None) -> float:
    """Return the peak memory in bytes: of the CUDA allocator if there is a device, else of the resident set."""
    if device is not None:
        return float(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return math.nan
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES)


@final
class PeakMemory:
    """Reads the peak memory at most once per `MEMORY_INTERVAL_S`.

    Args:
        device: A CUDA device, or None.
        attempts: Counts the failures of each feature.
        on_reading: Called after each reading.
    """

    def __init__(self, device: torch.device | None, attempts: Attempts, on_reading: Callable[[], object]) -> None:
        self.attempts = attempts
        self._on_reading = on_reading
        self._device = device
        self._bytes = math.nan
        self._read_at = -math.inf

    def at(self, clock: float) -> float:
        """Return the peak memory in bytes, read again if the last reading is older than `MEMORY_INTERVAL_S`."""
        if clock - self._read_at >= MEMORY_INTERVAL_S:
            self._read_at = clock
            self._read()
            self._on_reading()
        return self._bytes

    @best_effort("the peak memory")
    def _read(self) -> None:
        self._bytes = peak_memory(self._device)


@final
class LossAverage:
    """Averages the losses of the micro-batches of a step.

    Args:
        remote_device: Device that the host must not wait for, or None.

    Attributes:
        mean: Mean of the losses that the host knows, over all calls.
        remote_sum: Sum of the losses that only the device knows, or None.
    """

    def __init__(self, remote_device: torch.device | None) -> None:
        self._remote_device = remote_device
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.mean = 0.0
        self.remote_sum: Tensor | None = None

    def is_remote(self, value: object) -> bool:
        """Return whether reading a value would have to wait for the device."""
        return isinstance(value, Tensor) and value.device == self._remote_device

    def add(self, loss: Tensor | float | None, *, calls: int) -> float:
        """Add a loss.

        Args:
            loss: The loss; a tensor counts by its mean.
            calls: Number of losses of the step, including this one.

        Returns:
            The loss, nan for None; 0 for a loss that only the device knows.
        """
        value = 0.0
        if isinstance(loss, Tensor) and self.is_remote(loss):
            mean = local_part(loss).detach().float().mean()  # a copy: a CUDA graph writes to the same loss again
            self.remote_sum = mean if self.remote_sum is None else self.remote_sum + mean
        else:
            value = to_number(loss)
        # a remote loss counts as 0 here; `PendingRow.complete` adds `remote_sum / calls`
        self.mean = (self.mean * (calls - 1) + value) / calls
        return value
