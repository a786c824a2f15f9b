"""Read the total, used and free memory of a GPU, or of this process and its machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

resource: ModuleType | None
try:
    import resource
except ImportError:  # not on Windows
    resource = None

STATM, MEMINFO = Path("/proc/self/statm"), Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def machine_memory(device: str) -> int:
    """Return the bytes that tensors may take on a type of device: all memory of the machine for `cpu`.

    On `cuda`, these are the bytes that torch holds or can still get: the CUDA context and other processes take a part.
    """
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory() -> float | None:
    """Return the bytes of this process without files that it maps; None outside of Linux.

    The system takes the pages of mapped files back when it needs them.
    """
    try:
        resident, shared = map(int, STATM.read_text().split()[1:3])
    except (OSError, ValueError):
        return None
    return float((resident - shared) * os.sysconf("SC_PAGE_SIZE"))


def host_memory_left() -> float:
    """Return the bytes that this process can still get, within the limit of its container; infinity if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        available = 1024 * float(lines["MemAvailable"].split()[0])
        return min(available, _left_in_cgroup(), _left_in_address_space())
    except (OSError, KeyError, ValueError):
        return math.inf


def cuda_memory_left(device: torch.device) -> float:
    """Return the bytes of a GPU that are left for more tensors."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached)


def cuda_statistics(device: torch.device) -> Mapping[str, int]:
    """Return the statistics of the CUDA allocator."""
    statistics: Mapping[str, int] = torch.cuda.memory_stats(device)
    return statistics


def _left_in_address_space() -> float:
    """Return the bytes that are left in the limit of `ulimit -v`; infinity without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource else -1
    if limit < 0:  # `RLIM_INFINITY`
        return math.inf
    return max(limit - int(STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"), 0.0)


def _left_in_cgroup() -> float:
    """Return the bytes that are left in the limit of a container; infinity without a limit."""
    try:
        limit = float((CGROUP / "memory.max").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # the cache of files is counted, and given back when memory is needed
        used = float((CGROUP / "memory.current").read_text()) - float(statistics["inactive_file"])
    except (OSError, KeyError, ValueError):  # `max`: no limit
        return math.inf
    return max(limit - used, 0.0)
