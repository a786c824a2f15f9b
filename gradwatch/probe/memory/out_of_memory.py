"""Recognize the errors of failed allocations, and parse their messages."""

from __future__ import annotations

import re

import torch

from gradwatch.events import ALLOCATION_FAILED, Observation

CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch names its allocator in the text, its only mark on the CPU
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", re.IGNORECASE)
_UNITS = {"bytes": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that an allocation failed."""
    # on the CPU, torch raises a plain RuntimeError
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)
    )


def describe_out_of_memory(error: BaseException) -> Observation:
    """Return the observation for an error of a failed allocation."""
    found = _REQUESTED.search(str(error))
    requested = float(found[1]) * _UNITS.get(found[2].lower(), 1) if found else -1
    is_cuda = isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized()
    used = torch.cuda.memory_allocated() if is_cuda else -1
    return ALLOCATION_FAILED.observe(
        values={"requested": requested, "used": used}, reason=f"out of memory: {reason(error)}"
    )


def reason(error: BaseException) -> str:
    """Return the first sentence of an error of a failed allocation, without the location in torch's source."""
    text = str(error).rpartition(f"{CPU_ALLOCATOR}: ")[2]
    return text.splitlines()[0].split(". ")[0] if text else "Python could get no more"
