"""Overhead budget: sample optional statistics less often until the monitor stays within its share of the time."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple, final

from gradwatch.step_time import StepTimer
from gradwatch.time_quota import TimeQuota

SETTLING_STEPS = 64
"""Steps at the beginning that follow the schedule at any cost: faults from the start show there, and the usual step
time is known afterwards."""
REVIEW_STEPS = 64
"""Steps between two reviews of the costs."""
MAX_FACTOR = 16
"""How many times less often than scheduled a statistic is measured at most, so that it is still seen."""
STEPS_PER_FACTOR = 32
"""Steps made so far, for each time that something is measured less often: a statistic that is scheduled every 10 steps
is seen again before the run is 1/3 longer."""
CLOSE_WATCH_STEPS = 64
"""Steps after a new finding that follow the schedule, so that its causes can be told apart."""
NUM_SLICES = 20
"""Slices of the parameters whose histograms are measured one after the other, if that many steps are sampled."""


class HistogramSlice(NamedTuple):
    """The parameters whose histograms are due: slice `place`, counted from 0, of `of` slices."""

    place: int
    of: int


class DueStatistics(NamedTuple):
    """The sampled statistics that are measured at a step."""

    updates: bool
    activations: bool
    histograms: HistogramSlice | None


NOTHING_DUE = DueStatistics(False, False, None)
ALL_PARAMETERS = HistogramSlice(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps between two measurements of the sampled statistics; 0 for never.

    Args:
        updates: Weight norms and update/weight ratios.
        activations: Statistics of activation modules.
        histograms: Histograms of the gradient and the weights of a parameter. Each sampled step measures a slice of the
            parameters, so that no step waits for all; the first step of a run measures all.
        budget: Share of the time that watching may take. Above it, all these are measured less often, by a power of
            two; 0 follows the schedule at any cost, and so at the same steps in every run.
    """

    updates: int = 10
    activations: int = 10
    histograms: int = 200
    budget: float = 0.02


@final
class Budget:
    """Schedules the optional statistics.

    It compares the monitor's overhead with the time that steps took, without pauses, since the last review, and halves
    or doubles how often optional statistics are measured. Norms and finiteness of every layer are read at every step
    and are not optional: if they alone exceed the budget, only the optional statistics can be reduced.

    Args:
        schedule: The schedule that was asked for.

    Attributes:
        factor: How many times less often than scheduled statistics are measured now: a power of two.
        next_review: First step at which `review` adjusts the factor again.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.factor = 1
        self._slice_every, self._num_slices = histogram_slices(schedule)
        self._next_slice = 0  # counted, since the steps between two slices may change
        self._every = math.gcd(schedule.updates, schedule.activations, self._slice_every)
        self._timer = StepTimer()
        self._quota = TimeQuota(schedule.budget)  # charged with the overhead that is not optional
        self._reset()
        self.next_review = SETTLING_STEPS
        self._close_watch_until = 0
        self._owes_histograms = False

    def is_due(self, every: int, step: int) -> bool:
        """Return whether a statistic that is scheduled every `every` steps is measured at a step."""
        return every > 0 and step % every == 0 and (step < self._close_watch_until or step % (every * self.factor) == 0)

    def due(self, step: int) -> DueStatistics:
        """Return the statistics that are due at a step. To be called once per step."""
        if self._every == 0 or step % self._every:
            return NOTHING_DUE
        schedule, is_due = self.schedule, self.is_due
        updates, activations = is_due(schedule.updates, step), is_due(schedule.activations, step)
        owed = self._owes_histograms and (updates or activations)
        self._owes_histograms &= not owed
        due_slice = None
        if owed or (step == 0 and schedule.histograms > 0):
            due_slice = ALL_PARAMETERS
        elif is_due(self._slice_every, step):
            due_slice = HistogramSlice(self._next_slice, self._num_slices)
            self._next_slice = (self._next_slice + 1) % self._num_slices
        return DueStatistics(updates, activations, due_slice)

    def next_due(self, step: int) -> int:
        """Return the first step from `step` at which something is due; `sys.maxsize` if nothing ever is."""
        schedule = self.schedule
        scheduled = [every for every in (schedule.updates, schedule.activations, self._slice_every) if every > 0]
        return min((self._next(every, step) for every in scheduled), default=sys.maxsize)

    def _next(self, every: int, step: int) -> int:
        scheduled = -(-step // every) * every
        if scheduled < self._close_watch_until:
            return scheduled
        return -(-step // (every * self.factor)) * every * self.factor

    def charge(self, *wall_s: float, watch_s: float, optional_s: float) -> None:
        """Charge the time that steps took.

        Args:
            wall_s: Seconds from the last step to each of them.
            watch_s: Overhead of the monitor in seconds, on all threads.
            optional_s: Its part that was spent on the scheduled statistics.
        """
        self._quota.charge(watch_s - optional_s)
        self._optional_s += optional_s
        self._wall_s += self._timer.training_s(*wall_s)

    def watch_closely(self, step: int) -> None:
        """Follow the schedule for a while, with all histograms once, since something was found."""
        self._close_watch_until = step + CLOSE_WATCH_STEPS
        self._owes_histograms = self.schedule.histograms > 0 and self.schedule.budget > 0

    def review(self, step: int) -> bool:
        """Adjust to the costs, if a review is due; return whether the factor changed."""
        if step < self.next_review:
            return False
        self.next_review = step + REVIEW_STEPS * self.factor
        before = self.factor
        if self.schedule.budget and self._wall_s:
            self.factor = self._affordable(most=min(MAX_FACTOR, step // STEPS_PER_FACTOR))
        self._reset()
        return self.factor != before

    def _reset(self) -> None:
        """Start to count the costs again."""
        self._quota.reset()
        self._optional_s = self._wall_s = 0.0

    def _affordable(self, *, most: int) -> int:
        """Return the smallest factor, at most `most`, at which the cost would have been within the budget."""
        available_s = self._quota.remaining_s(self._wall_s)
        scheduled_s = self._optional_s * self.factor
        factor = 1
        while 2 * factor <= most and scheduled_s / factor > available_s:
            factor *= 2
        return factor


def histogram_slices(schedule: Schedule) -> tuple[int, int]:
    """Return the steps between two slices of histograms, 0 for never, and the number of slices of all parameters."""
    every = schedule.histograms
    often = min((sampled for sampled in (schedule.updates, schedule.activations) if sampled > 0), default=1)
    num_slices = min(NUM_SLICES, every // often)
    if num_slices > 1:
        every = every // num_slices // often * often
    return every, max(1, schedule.histograms // max(1, every))
