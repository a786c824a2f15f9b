"""Random numbers of the data: seeds from what a sample is, and the global generators left as they were found."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Iterator

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that is a pure function of some integers, unrelated for unequal ones."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and torch. Call it inside `preserved`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for the GPU, also in a worker


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Put the global CPU generators of Python, NumPy and torch back to where they were, also after an error."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
