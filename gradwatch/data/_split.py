"""Choose the validation samples: a pure function of the labels, the fraction and a seed."""

# N = samples

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import GradwatchError

Indices = NDArray[np.int64]


def random_split(size: int, *, val_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return the indices of the training and the validation part, each in ascending order.

    Args:
        size: Number of samples.
        val_fraction: Fraction to hold out, from 0 to below 1; rounded to whole samples.
        seed: Seed of the choice.

    Raises:
        GradwatchError: The fraction is out of range.
    """
    _check(val_fraction)
    held_out = _held_out(size, val_fraction)
    chosen = np.zeros(size, bool)
    chosen[np.random.default_rng(seed).permutation(size)[:held_out]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def stratified_split(labels_N: NDArray[np.int64], *, val_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return the indices of both parts, split within each label, so that both have the same label proportions.

    A label keeps at least one sample in the training part.

    Args:
        labels_N: Label of each sample.
        val_fraction: Fraction to hold out of each label, from 0 to below 1; rounded to whole samples.
        seed: Seed of the choice.

    Raises:
        GradwatchError: The fraction is out of range.
    """
    _check(val_fraction)
    rng = np.random.default_rng(seed)
    chosen_N = np.zeros(len(labels_N), bool)
    for label in np.unique(labels_N):
        members = np.flatnonzero(labels_N == label)
        chosen_N[rng.permutation(members)[: _held_out(len(members), val_fraction)]] = True
    return np.flatnonzero(~chosen_N), np.flatnonzero(chosen_N)


def _held_out(size: int, val_fraction: float) -> int:
    # at most size - 1, so that one sample is left to train on
    return min(round(size * val_fraction), max(size - 1, 0))


def _check(val_fraction: float) -> None:
    if not 0.0 <= val_fraction < 1.0:
        raise GradwatchError(f"data.val_fraction: got {val_fraction}, expected a number from 0 to below 1")
