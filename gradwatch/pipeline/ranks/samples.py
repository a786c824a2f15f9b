"""Find samples that several ranks train on, from the hashes that each rank has kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

SAMPLE = "sample."
"""Begin of the name of a value in the state of a rank: the first step that had the sample with this hash."""
UNTIL = "samples_until"
"""Name of the value that ends the steps whose samples the state of a rank covers."""
KEPT = 256
"""Hashes that a rank keeps: the smallest ones. If two ranks share 10 % of their samples, 13 kept hashes match."""

MIN_SHARED, SHARED_FRAC = 16, 0.1
"""Number and fraction of the kept samples of a rank that another rank has.

If ranks draw from one dataset with replacement, a rank draws a sample again about as soon as another rank draws it. The
first sample that a rank draws again ends the comparison, so 16 shared samples before it have a chance of 2^-16.
"""
MIN_STEPS = 5
"""Minimum number of steps with shared samples: one batch may be for all ranks, such as a warm-up."""
FRESH_FRAC = 0.25
"""Samples that are new to all ranks after the first shared one, relative to the shared ones.

Without new samples, the data is exhausted, and a second epoch gives the ranks each other's samples.
"""


@final
class KeptSamples:
    """The smallest hashes of all samples of a rank, each with the first step that had the sample.

    Every rank keeps the same samples if it has them, in any order. So a few hashes estimate how many samples two ranks
    share.
    """

    def __init__(self) -> None:
        self._hashes, self._steps = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._again = math.inf

    def add(self, hashes: NDArray[np.int64], steps: NDArray[np.int64]) -> bool:
        """Add samples, and return whether the rank has seen a sample at two steps.

        Args:
            hashes: Hash of each sample.
            steps: Step of each sample.
        """
        hashes, steps = np.concatenate([self._hashes, hashes]), np.concatenate([self._steps, steps])
        order = np.lexsort((steps, hashes))
        hashes, steps = hashes[order], steps[order]
        is_same = hashes[1:] == hashes[:-1]
        # a step may call the model on its batch several times
        again = steps[1:][is_same & (steps[1:] != steps[:-1])]
        self._again = min([self._again, *again.tolist()])
        is_first = np.concatenate([[True], ~is_same])
        self._hashes, self._steps = hashes[is_first][:KEPT], steps[is_first][:KEPT]
        return math.isfinite(self._again)

    def values(self, step: int) -> dict[str, float]:
        """Return the hashes and their steps as values of an event at a step."""
        kept = zip(self._hashes.tolist(), self._steps.tolist(), strict=True)
        return {UNTIL: min(self._again, step + 1.0)} | {f"{SAMPLE}{key:x}": float(first) for key, first in kept}


Samples = Mapping[str, int]
"""The first step that had a sample, by its hash."""


class SharedSamples(NamedTuple):
    """Samples that two ranks have trained on.

    Attributes:
        rank: The lower rank.
        other: The higher rank.
        fraction: Fraction of the samples of the rank with fewer samples.
        step: The first step at which one of the ranks had a sample that the other rank had.
    """

    rank: int
    other: int
    fraction: float
    step: int


def find_shared(states: Mapping[int, Mapping[str, float]]) -> SharedSamples | None:
    """Return the first two ranks that share samples in the same epoch, or None.

    Args:
        states: The newest state of each rank with hashes of samples.
    """
    samples = _comparable(states)
    fresh: dict[str, int] = {}
    for of_rank in samples.values():
        for key, step in of_rank.items():
            fresh[key] = min(step, fresh.get(key, step))
    for (rank, other), steps in _meetings(samples).items():
        fraction = len(steps) / min(len(samples[rank]), len(samples[other]))
        num_fresh = sum(step > min(steps) for step in fresh.values())
        is_often = len(steps) >= MIN_SHARED and fraction >= SHARED_FRAC and len(set(steps)) >= MIN_STEPS
        if is_often and num_fresh >= FRESH_FRAC * len(steps):
            return SharedSamples(rank, other, fraction, min(steps))
    return None


def _comparable(states: Mapping[int, Mapping[str, float]]) -> dict[int, Samples]:
    """Return the samples of each rank in the steps that all ranks cover, of the hashes that all would have kept."""
    until = min((values[UNTIL] for values in states.values()), default=0.0)
    found = {
        rank: {key: int(at) for key, at in values.items() if key.startswith(SAMPLE)} for rank, values in states.items()
    }
    largest = min((max(map(_number, kept)) for kept in found.values() if len(kept) == KEPT), default=math.inf)
    return {
        rank: {key: step for key, step in kept.items() if step < until and _number(key) <= largest}
        for rank, kept in found.items()
    }


def _meetings(samples: Mapping[int, Samples]) -> dict[tuple[int, int], list[int]]:
    """Return for each pair of ranks the steps at which the later one had a sample of the other."""
    meetings: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, other in _pairs(sorted(samples)):
        for key in samples[rank].keys() & samples[other].keys():
            meetings[rank, other].append(max(samples[rank][key], samples[other][key]))
    return meetings


def _pairs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    return ((rank, other) for i, rank in enumerate(ranks) for other in ranks[i + 1 :])


def _number(key: str) -> int:
    return int(key.removeprefix(SAMPLE), 16)
