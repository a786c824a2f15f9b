"""Read how much memory this machine has."""

from __future__ import annotations

import os

import torch


def machine_memory(device: str) -> int:
    """Return the bytes of memory of a device of this machine: of the GPU for `cuda`, else of the machine."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
