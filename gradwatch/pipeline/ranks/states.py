"""Compare the states that the ranks of a training have read at a few equal steps."""

# R = ranks

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.events import (
    RANK_BUFFERS_DIFFER,
    RANK_DRAWS_EQUAL,
    RANK_FACTOR,
    RANK_MOMENTS_DIFFER,
    RANK_NOISE,
    RANK_SAMPLES_SHARED,
    RANK_WEIGHTS_AGREE,
    EventKind,
)
from gradwatch.history.store import Floats
from gradwatch.pipeline.ranks.samples import UNTIL, find_shared
from gradwatch.records import Event

DENSE_STEPS = 5
"""Number of first steps that are all read. Later steps are read at the powers of two, about 20 in a run."""
TOLERANCE = 1e-4
"""Relative difference of two equal norms. Another order of summation changes a norm by 1e-6 or less, and gradients of
other batches differ by 1e-2 or more."""
WEIGHT_TOLERANCE = 2e-6
"""Relative difference of two norms of equal weights: a few roundings of a float32. Replicas have equal bits."""
FACTOR_TOLERANCE = 0.02
"""Relative deviation of a factor: averaging in bfloat16 rounds by 0.4 %."""
REPEATS = 2
"""Successive states that must show a difference: the first buffers may be those before a broadcast."""


def is_due(step: int) -> bool:
    """Return whether the ranks read their states at a step."""
    return step < DENSE_STEPS or step.bit_count() == 1


@final
class StateComparison:
    """Compares the states of the ranks, as their events `rank-state` record them.

    Args:
        world_size: Number of ranks.
        has_scale: Whether a GradScaler scales the loss, so that local gradients have an unknown scale.
        has_own_batches: Whether each rank has its own batches, and so its own random numbers.

    Attributes:
        clip_factors: Norm of the gradients after clipping / before clipping, by step.
        has_batches: Whether the loop passes its batches. Without them, samples are not compared.
        is_apart: Whether the gradients differ between the ranks. Weights that agree are then an event.
    """

    def __init__(self, world_size: int, *, has_scale: bool, has_own_batches: bool) -> None:
        self.clip_factors: dict[int, float] = {}
        self.has_batches = self.is_apart = False
        self._world_size, self._has_scale, self._has_own_batches = world_size, has_scale, has_own_batches
        self._states: dict[int, dict[int, Mapping[str, float]]] = {}
        self._samples: dict[int, Mapping[str, float]] = {}
        self._compared = -1
        self._since: dict[str, list[int]] = {}
        self._emitted: set[str] = set()

    @property
    def next_step(self) -> int | None:
        """The oldest step of rank 0 that is not compared yet, or None."""
        return min((step for step, of_rank in self._states.items() if 0 in of_rank), default=None)

    def add(self, rank: int, event: Event) -> None:
        """Add the state of a rank."""
        if event.step > self._compared:
            self._states.setdefault(event.step, {})[rank] = event.values

    def compare(self, present: Mapping[int, bool]) -> Iterator[Event]:
        """Yield the events of the steps that all ranks have read.

        Args:
            present: Whether each rank has reached `next_step`.
        """
        for step in sorted(self._states):
            known = self._states[step]
            if 0 not in known or not all(rank in known for rank in present):
                if all(present.values()) and step == self.next_step:
                    del self._states[step]  # a rank has passed it without a reading
                    continue
                return
            self._compared = step
            del self._states[step]
            ranks = sorted(present)
            yield from self._compare_step(step, ranks, [known[rank] for rank in ranks])

    def _compare_step(self, step: int, ranks: list[int], states: list[Mapping[str, float]]) -> Iterator[Event]:
        column = {
            name: np.array([state.get(name, math.nan) for state in states])
            for name in ("weights", "moments", "buffers", "random", "local", "reduced", "product")
        }
        if self.is_apart and not find_differing(column["weights"], WEIGHT_TOLERANCE).any():
            yield RANK_WEIGHTS_AGREE.emit(step=step)
        yield from self._emit(RANK_MOMENTS_DIFFER, step, _odd_rank(ranks, column["moments"]))
        yield from self._emit(RANK_BUFFERS_DIFFER, step, _odd_rank(ranks, column["buffers"]))
        pair = equal_pair(column["random"]) if self._has_own_batches else None
        values = {"rank": ranks[pair[0]], "other": ranks[pair[1]]} if pair else None
        yield from self._emit(RANK_DRAWS_EQUAL, step, values)
        self._samples |= {rank: state for rank, state in zip(ranks, states, strict=True) if UNTIL in state}
        yield from self._shared_samples()
        factor = self._factor(step, column) if len(ranks) == self._world_size else None
        yield from self._emit(RANK_FACTOR, step, factor)
        if len(ranks) == self._world_size and self._has_own_batches:
            yield from _noise(step, column)

    def _shared_samples(self) -> Iterator[Event]:
        if not self.has_batches or RANK_SAMPLES_SHARED.name in self._emitted:
            return
        if shared := find_shared(self._samples):
            self._emitted.add(RANK_SAMPLES_SHARED.name)
            values = {"rank": shared.rank, "other": shared.other, "shared": shared.fraction}
            yield RANK_SAMPLES_SHARED.emit(step=shared.step, values=values, percent=100 * shared.fraction)

    def _factor(self, step: int, column: Mapping[str, Floats]) -> dict[str, float] | None:
        """Return the ratio of the gradients to their average, if it is the number of ranks or its inverse."""
        # <average of the local gradients, G> = |G|^2 / k for gradients G that are k times the average
        product, clipped = float(column["product"].mean()), self.clip_factors.get(step, 1.0)
        if self._has_scale or not product > 0 or not clipped > 0:
            return None
        factor = float(column["reduced"][0]) / (product * clipped)
        for expected in (self._world_size, 1 / self._world_size):
            if abs(factor / expected - 1) < FACTOR_TOLERANCE:
                return {"factor": expected, "ranks": self._world_size}
        return None

    def _emit(self, kind: EventKind, step: int, values: Mapping[str, float] | None) -> Iterator[Event]:
        """Yield the event, once, after successive states have shown the difference."""
        since = self._since.setdefault(kind.name, [])
        if values is None:
            since.clear()
            return
        since.append(step)
        if len(since) == REPEATS and kind.name not in self._emitted:
            self._emitted.add(kind.name)
            yield kind.emit(step=since[0], values=values)


def _noise(step: int, column: Mapping[str, Floats]) -> Iterator[Event]:
    """Yield the norms of the gradients before and after their average, if the ranks have updated with it."""
    local_R, reduced_R, product = column["local"], column["reduced"], float(column["product"].mean())
    if not (np.isfinite(local_R).all() and product > 0) or find_differing(reduced_R).any() or equal_pair(local_R):
        return
    # for gradients G = k A of the average A: |A|^2 = <A, G>^2 / |G|^2, whatever clipping or a loss scale make of k
    local, average = float(local_R.mean()), product**2 / float(reduced_R[0])
    values = {"local": local, "average": average, "ranks": len(local_R)}
    yield RANK_NOISE.emit(step=step, values=values, fraction=average / local)


def _odd_rank(ranks: Sequence[int], values_R: Floats) -> dict[str, float] | None:
    """Return the rank whose value differs, or -1 if several do; None if no value does."""
    odd = np.flatnonzero(find_differing(values_R))
    return {"rank": ranks[odd[0]] if len(odd) == 1 else -1} if len(odd) else None


def find_differing(values_R: Floats, tolerance: float = TOLERANCE) -> NDArray[np.bool_]:
    """Return which values differ from most ranks; with two ranks, from rank 0.

    Args:
        values_R: The values, with a row per rank and any further axes.
        tolerance: Relative difference of two equal values.
    """
    if len(values_R) == 2:
        usual = values_R[0]
    else:  # the median of the values that are not nan, which sort last
        middle = np.maximum((~np.isnan(values_R)).sum(0) - 1, 0) // 2
        usual = np.take_along_axis(np.sort(values_R, axis=0), middle[None], axis=0)[0]
    with np.errstate(all="ignore"):
        is_near = np.abs(values_R - usual) <= tolerance * np.maximum(np.abs(values_R), np.abs(usual))
    return np.asarray(~is_near & ~(np.isnan(values_R) & np.isnan(usual)))


def equal_pair(values_R: Floats) -> tuple[int, int] | None:
    """Return the indices of the first two equal values that are not nan, or None."""
    first: dict[float, int] = {}
    for i, value in enumerate(values_R.tolist()):
        if value == value and (before := first.setdefault(value, i)) != i:
            return before, i
    return None
