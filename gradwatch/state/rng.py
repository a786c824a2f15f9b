"""Save and restore every random generator: Python, NumPy, torch on the CPU and on each CUDA device in use."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of all random generators: Python, NumPy, torch on the CPU and on each CUDA device in use."""
    in_use = torch.cuda.is_initialized()  # reading the generators would initialize CUDA
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if in_use else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore all random generators to a state that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # not strict: a run from a machine with eight devices can continue on a machine with one
    for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator, device)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore all random generators at the end of a `with` block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
