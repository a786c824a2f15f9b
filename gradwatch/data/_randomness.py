"""Seed the random numbers of the data by sample, and preserve the global generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Iterator

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that is a pure function of the numbers, unrelated for unequal numbers."""
    # not hash(): its values may change between versions of Python
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and torch. Call it inside `preserved`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # NumPy takes 32 bits
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU too, even in a worker


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the global CPU generators of Python, NumPy and torch at the end, also after an error."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
