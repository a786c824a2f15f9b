"""Judge readings of memory: whether its growth will fill it, and whether it is fragmented."""

# N = readings

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.events import MEMORY_FRAGMENTED, MEMORY_GROWS, Observation

Floats = NDArray[np.float64]
MEGABYTE, GIGABYTE = 1e6, 1e9

MIN_READINGS = 16
"""Minimum number of readings to judge, at most one a second."""

MAX_READINGS = 64
"""Maximum number of readings to keep. Then every second one is dropped, so that they cover the whole run."""

MIN_EVENNESS = 0.5
"""Minimum ratio of the slowest to the fastest quarter of the growth. A cache that fills up grows ever more slowly."""

MIN_RETRIES = 2
"""Minimum number of allocations that had to be tried again. One happens when a batch is the largest so far."""

MIN_SPLIT_FRAC = 0.2
"""Minimum fraction of the reserved memory in unusable pieces. PyTorch's own allocator rounds up by less."""


@final
class GrowthJudge:
    """Judge whether the memory in use grows evenly, and would be full after as many steps as have been seen.

    Growth alone is not a fault: a replay buffer and a cache of the data grow as well, and then stop. So it counts only
    when half of the memory that was free is used up.

    Args:
        total_steps: Planned optimizer steps, or None if unknown.
    """

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = total_steps
        self._readings: list[tuple[int, float]] = []
        self._every, self._skipped = 1, 0

    def add(self, step: int, used: float, left: Callable[[], float]) -> Observation | None:
        """Add a reading, and return an observation if the memory will be full.

        Args:
            step: Optimizer step.
            used: Bytes in use at this step.
            left: Returns the bytes that are left; called only if the memory grows evenly.
        """
        self._skipped += 1
        if self._skipped < self._every:
            return None
        self._skipped = 0
        self._readings.append((step, used))
        if len(self._readings) > MAX_READINGS:
            self._readings, self._every = self._readings[::2], 2 * self._every
        return self._judge(left) if len(self._readings) >= MIN_READINGS else None

    def _judge(self, left: Callable[[], float]) -> Observation | None:
        # without the first quarter: libraries and data workers start there
        steps_N, used_N = np.array(self._readings[len(self._readings) // 4 :]).T
        quarters = [(part_N.mean(), steps.mean()) for part_N, steps in _quarters(used_N, steps_N)]
        rates = [(b - a) / max(t - s, 1) for (a, s), (b, t) in itertools.pairwise(quarters)]
        if not (min(rates) > 0 and min(rates) >= MIN_EVENNESS * max(rates)):
            return None
        (first, begin), (last, end) = quarters[0], quarters[-1]
        rate = (last - first) / (end - begin)
        step, remaining = int(steps_N[-1]), left()
        steps_left = remaining / rate
        is_in_time = self._total_steps is not None and step + steps_left >= self._total_steps
        if is_in_time or steps_left > step - self._readings[0][0]:
            return None
        values = {"rate": rate, "used": float(used_N[-1]), "left": remaining, "steps": steps_left}
        return MEMORY_GROWS.observe(values=values, megabytes=rate / MEGABYTE)


def find_fragmentation(statistics: Mapping[str, int]) -> Observation | None:
    """Return an observation if the memory of a CUDA device is fragmented.

    Args:
        statistics: The result of `torch.cuda.memory_stats`.
    """
    retries = statistics.get("num_alloc_retries", 0)
    split = statistics.get("inactive_split_bytes.all.current", 0)
    reserved = statistics.get("reserved_bytes.all.current", 0)
    if retries < MIN_RETRIES or split < MIN_SPLIT_FRAC * reserved or not reserved:
        return None
    values = {"split": split, "reserved": reserved, "retries": retries}
    return MEMORY_FRAGMENTED.observe(values=values, gigabytes=split / GIGABYTE, of=reserved / GIGABYTE)


def _quarters(used_N: Floats, steps_N: Floats) -> list[tuple[Floats, Floats]]:
    return list(zip(np.array_split(used_N, 4), np.array_split(steps_N, 4), strict=True))
