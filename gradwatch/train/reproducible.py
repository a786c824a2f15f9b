"""Pin every source of randomness in a context: Python, NumPy, torch, CUDA and the choice of algorithms."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from gradwatch.state.rng import random_state, set_random_state

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = ":4096:8"  # https://docs.nvidia.com/cuda/cublas, section Results reproducibility
NUMPY_SEEDS = 1 << 32
"""Exclusive upper limit of seeds for NumPy's global generator."""


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch, on the CPU and all other devices."""
    random.seed(seed)
    np.random.seed(seed % NUMPY_SEEDS)
    torch.manual_seed(seed)


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Make a block or a function give the same numbers each time on the same machine.

    This pins five sources: the generators of Python, NumPy, torch and CUDA, and the choice of algorithms. An operation
    without a deterministic algorithm raises RuntimeError. All settings and generators are restored at the end.

    Args:
        seed: Seed of all generators.
    """
    with _kept_generators(), _kept_algorithms():
        seed_all(seed)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(CUBLAS, CUBLAS_DETERMINISTIC)  # the user's own choice has priority
        yield


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    state = random_state()
    seed = torch.initial_seed()
    try:
        yield
    finally:
        if not state["cuda"]:
            # CUDA was not initialized: its generators would have started from the seed of the CPU generator
            torch.cuda.manual_seed_all(seed)
        set_random_state(state)


@contextlib.contextmanager
def _kept_algorithms() -> Iterator[None]:
    # the debug mode, not are_deterministic_algorithms_enabled(): it also distinguishes `warn` from `error`
    mode = torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(CUBLAS)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = workspace
