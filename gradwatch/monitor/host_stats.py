"""Numbers of a step that no probe gives: losses, the size of a batch, memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradwatch.probe.device.sync import to_float

resource: ModuleType | None
try:
    import resource
except ImportError:  # not on Windows
    resource = None

ROUNDING = 1e-5  # relative: total norms of the same gradients differ by less, whichever way they were summed
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage(2): ru_maxrss is in bytes on macOS, in KiB on Linux


def number(value: Tensor | float | None) -> float:
    """Return a number, the mean of a tensor with several values, or nan for None."""
    if isinstance(value, Tensor):
        return to_float(value if value.numel() == 1 else value.detach().float().mean())
    return math.nan if value is None else float(value)


def num_samples(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch, or None where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for part in parts if (n := num_samples(part)) is not None), None)


def peak_memory(device: torch.device | None) -> float:
    """Return the peak of the allocator of a CUDA device, of the resident set where there is none, in bytes."""
    if device is not None:
        return float(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return math.nan
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT)
