"""The promise of what watching may cost: what is optional is measured more seldom, until the time is kept."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple, final

from gradwatch.step_time import Pace

SETTLING = 64
"""Steps at the beginning that are watched as scheduled, whatever it costs: what ails from the start shows there, and
what steps take is known then."""
REVIEW_EVERY = 64
"""Steps from one look at the costs to the next."""
MOST = 16
"""How many times more seldom than scheduled something is measured at most, so that it is still seen at times."""
STEADY = 32
"""Steps that have been made for each time more seldom: what is scheduled every 10 steps is seen again before a run is a
third older."""
CLOSE_LOOK = 64
"""Steps that are watched as scheduled after a new finding, so that its causes can be told apart."""

TURNS = 20
"""Turns that it takes to show the histograms of all parameters, where so many steps are sampled in the time."""


class Turn(NamedTuple):
    """Whose histograms are due at a step: those of one of several shares of the parameters, counted from 0."""

    place: int
    of: int


class Due(NamedTuple):
    """What is measured at a step."""

    updates: bool
    activations: bool
    histograms: Turn | None


NOTHING = Due(False, False, None)
EVERYTHING = Turn(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Every how many steps the sampled statistics are measured; 0 for never.

    Args:
        updates: Weight norms and update/weight ratios.
        activations: Statistics of activation modules.
        histograms: Histograms of the gradient and the weights of a parameter. Parameters take turns, a share at each
            sampled step, so that no step waits for all; the first step of a run has all.
        budget: Part of the time that watching may take. Where it takes more, all these are measured more seldom, by
            a power of two; 0 keeps to the schedule at any cost, and so to the same steps in every run.
    """

    updates: int = 10
    activations: int = 10
    histograms: int = 200
    budget: float = 0.02


@final
class Budget:
    """Says when something optional is due.

    It compares what the monitor took with the time that steps took, pauses left out, since its last look, and measures
    optional things half or twice as often. Norms and finiteness of every layer are read at every step, and are no
    business of its own: where these alone take more than the budget, it can only leave out more of the rest.

    Args:
        schedule: What was asked for.

    Attributes:
        factor: How many times more seldom than scheduled things are measured now: a power of two.
        next_review: Step from which on `review` adapts anew.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.factor = 1
        self._turn_every, self._turns = turns_of(schedule)
        self._next_turn = 0  # counted, since the distance of turns may change
        self._every = math.gcd(schedule.updates, schedule.activations, self._turn_every)
        self._pace = Pace()
        self._forget()
        self.next_review = SETTLING
        self._close_until = 0
        self._owes_histograms = False

    def is_due(self, every: int, step: int) -> bool:
        """Say whether something that is scheduled every so many steps is measured at a step."""
        return every > 0 and step % every == 0 and (step < self._close_until or step % (every * self.factor) == 0)

    def due(self, step: int) -> Due:
        """Say whether updates, activations and histograms are due at a step, which is asked of once."""
        if self._every == 0 or step % self._every:
            return NOTHING
        schedule, is_due = self.schedule, self.is_due
        updates, activations = is_due(schedule.updates, step), is_due(schedule.activations, step)
        owed = self._owes_histograms and (updates or activations)
        self._owes_histograms &= not owed
        turn = None
        if owed or (step == 0 and schedule.histograms > 0):
            turn = EVERYTHING
        elif is_due(self._turn_every, step):
            turn = Turn(self._next_turn, self._turns)
            self._next_turn = (self._next_turn + 1) % self._turns
        return Due(updates, activations, turn)

    def next_due(self, step: int) -> int:
        """Return the first step from one on at which something is due; one that is never reached where nothing is."""
        schedule = self.schedule
        scheduled = [every for every in (schedule.updates, schedule.activations, self._turn_every) if every > 0]
        return min((self._next(every, step) for every in scheduled), default=sys.maxsize)

    def _next(self, every: int, step: int) -> int:
        scheduled = -(-step // every) * every
        if scheduled < self._close_until:
            return scheduled
        return -(-step // (every * self.factor)) * every * self.factor

    def charge(self, *wall_s: float, watch_s: float, optional_s: float) -> None:
        """Note what steps took.

        Args:
            wall_s: Seconds from the last step to each of them.
            watch_s: Seconds that the monitor took in all, on whatever thread.
            optional_s: Those of them that went into what this schedules.
        """
        self._watch_s += watch_s
        self._optional_s += optional_s
        self._wall_s += self._pace.counted(*wall_s)

    def look_closer(self, step: int) -> None:
        """Keep to the schedule for a while, with histograms where it begins, since something was found."""
        self._close_until = step + CLOSE_LOOK
        self._owes_histograms = self.schedule.histograms > 0 and self.schedule.budget > 0

    def review(self, step: int) -> bool:
        """Adapt to what was spent, where it is time to, and say whether anything changed."""
        if step < self.next_review:
            return False
        self.next_review = step + REVIEW_EVERY * self.factor
        before = self.factor
        if self.schedule.budget and self._wall_s:
            self.factor = self._affordable(most=min(MOST, step // STEADY))
        self._forget()
        return self.factor != before

    def _forget(self) -> None:
        """Begin to count anew."""
        self._watch_s = self._optional_s = self._wall_s = 0.0

    def _affordable(self, *, most: int) -> int:
        """Return the smallest factor up to one at which the cost would have been within the budget."""
        left_s = self.schedule.budget * self._wall_s - (self._watch_s - self._optional_s)
        scheduled_s = self._optional_s * self.factor
        factor = 1
        while 2 * factor <= most and scheduled_s / factor > left_s:
            factor *= 2
        return factor


def turns_of(schedule: Schedule) -> tuple[int, int]:
    """Return the steps between two turns of histograms, 0 for never, and how many turns show all parameters once."""
    every = schedule.histograms
    often = min((sampled for sampled in (schedule.updates, schedule.activations) if sampled > 0), default=1)
    turns = min(TURNS, every // often)
    if turns > 1:
        every = every // turns // often * often
    return every, max(1, schedule.histograms // max(1, every))
