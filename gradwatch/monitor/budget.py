"""Sample optional statistics less often until the overhead of the monitor is within its budget."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple, final

from gradwatch.step_time import StepTimer
from gradwatch.time_quota import TimeQuota

SETTLING_STEPS = 64
"""First steps, which follow the schedule at any cost. Faults that exist from the start show there, and the usual step
time is known after them."""
REVIEW_STEPS = 64
"""Steps between two reviews of the costs."""
MAX_FACTOR = 16
"""Largest factor by which the steps between two measurements grow, so that each statistic is still measured."""
STEPS_PER_FACTOR = 32
"""Steps of the run that each unit of the factor requires. A statistic that is scheduled every 10 steps is then
measured again before the run is 1/3 longer."""
CLOSE_WATCH_STEPS = 64
"""Steps after a new finding that follow the schedule, so that the diagnosis can separate its causes."""
NUM_SLICES = 20
"""Number of slices of the parameters. Each sampled step measures the histograms of one slice, if enough steps are
sampled."""


class HistogramSlice(NamedTuple):
    """The slice of parameters with histograms due: slice `number`, counted from 0, of `of` slices."""

    number: int
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
        budget: Fraction of the time that the monitor may take. Above it, all sampled statistics are measured less
            often, by a power of two. 0 follows the schedule at any cost, so every run measures at equal steps.
    """

    updates: int = 10
    activations: int = 10
    histograms: int = 200
    budget: float = 0.02


@final
class Budget:
    """Schedules the optional statistics.

    A review compares the overhead of the monitor with the time of the steps since the last review, without pauses. It
    then changes the sampling rate of optional statistics by a power of two. Norms and finiteness of every layer are
    read at every step and are not optional. If they alone exceed the budget, only optional statistics are reduced.

    Args:
        schedule: The schedule that the user chose.

    Attributes:
        factor: Factor by which the steps between two measurements exceed the schedule: a power of two.
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
        """Return the statistics that are due at a step. Call it once per step, since it advances the slices."""
        if self._every == 0 or step % self._every:  # almost all steps: every schedule is a multiple of the gcd
            return NOTHING_DUE
        schedule, is_due = self.schedule, self.is_due
        updates, activations = is_due(schedule.updates, step), is_due(schedule.activations, step)
        owed = self._owes_histograms and (updates or activations)
        self._owes_histograms &= not owed  # paid once per finding
        due_slice = None
        if owed or (step == 0 and schedule.histograms > 0):  # the initial weights, before any update
            due_slice = ALL_PARAMETERS
        elif is_due(self._slice_every, step):
            due_slice = HistogramSlice(self._next_slice, self._num_slices)
            self._next_slice = (self._next_slice + 1) % self._num_slices
        return DueStatistics(updates, activations, due_slice)

    def next_due(self, step: int) -> int:
        """Return the first step, `step` or later, at which a statistic is due; `sys.maxsize` if there is none."""
        schedule = self.schedule
        scheduled = [every for every in (schedule.updates, schedule.activations, self._slice_every) if every > 0]
        return min((self._next(every, step) for every in scheduled), default=sys.maxsize)

    def _next(self, every: int, step: int) -> int:
        scheduled = -(-step // every) * every  # rounded up
        if scheduled < self._close_watch_until:
            return scheduled
        return -(-step // (every * self.factor)) * every * self.factor

    def charge(self, *wall_s: float, watch_s: float, optional_s: float) -> None:
        """Charge the time that steps took.

        Args:
            wall_s: Seconds from the last step to each of them.
            watch_s: Overhead of the monitor in seconds, on all threads.
            optional_s: Seconds of it that the scheduled statistics took.
        """
        self._quota.charge(watch_s - optional_s)  # the fixed part: no factor reduces it
        self._optional_s += optional_s
        self._wall_s += self._timer.training_s(*wall_s)

    def watch_closely(self, step: int) -> None:
        """Follow the schedule for `CLOSE_WATCH_STEPS` after a finding, and measure all histograms once."""
        self._close_watch_until = step + CLOSE_WATCH_STEPS
        # without a budget nothing is thinned, and the samples must stay at the same steps in every run
        self._owes_histograms = self.schedule.histograms > 0 and self.schedule.budget > 0

    def review(self, step: int) -> bool:
        """Adjust the factor to the costs if a review is due. Return whether the factor changed."""
        if step < self.next_review:
            return False
        self.next_review = step + REVIEW_STEPS * self.factor  # as many samples between reviews, whatever the factor
        before = self.factor
        if self.schedule.budget and self._wall_s:
            self.factor = self._affordable(most=min(MAX_FACTOR, step // STEPS_PER_FACTOR))
        self._reset()
        return self.factor != before

    def _reset(self) -> None:
        self._quota.reset()
        self._optional_s = self._wall_s = 0.0

    def _affordable(self, *, most: int) -> int:
        """Return the smallest factor, at most `most`, with a cost within the budget."""
        available_s = self._quota.remaining_s(self._wall_s)
        scheduled_s = self._optional_s * self.factor  # the cost at factor 1
        factor = 1
        while 2 * factor <= most and scheduled_s / factor > available_s:
            factor *= 2
        return factor


def histogram_slices(schedule: Schedule) -> tuple[int, int]:
    """Return the steps between two slices of histograms, 0 for never, and the number of slices of all parameters."""
    every = schedule.histograms
    # slices fall on steps that are sampled anyway, so that they add no steps to the full path
    often = min((sampled for sampled in (schedule.updates, schedule.activations) if sampled > 0), default=1)
    num_slices = min(NUM_SLICES, every // often)
    if num_slices > 1:
        every = every // num_slices // often * often
    return every, max(1, schedule.histograms // max(1, every))  # `every` is 0 for never
