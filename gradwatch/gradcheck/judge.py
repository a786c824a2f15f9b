"""Judge every leaf of a step: at its own point, at points near it, and again if a kink or noise prevents a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.autograd import Function

from gradwatch.gradcheck.compare import LeafComparison, LeafOutcome
from gradwatch.gradcheck.options import ignore_progress
from gradwatch.gradcheck.stepping.cuts import Cut, GraphCuts
from gradwatch.gradcheck.stepping.function_calls import CallLog, RecordedCall, followed, is_deliberate
from gradwatch.gradcheck.stepping.step import CheckedStep, Gradients, Point

JITTER_FRAC = 1e-2
"""Distance of the points near the first one, in units of each tensor."""
LEAF_BY_LEAF_FRAC = 0.4
"""Fraction of the time within which all leaves must fit one by one; otherwise they are moved together."""
GROUPS_FRAC = 0.25
"""Fraction of the time for the first point if the leaves are moved in groups."""
RUNS_PER_DIRECTION = 3
"""Two runs for a difference that agrees, and more for one that does not."""


@final
@dataclass(slots=True)
class Examined:
    """The comparison of some leaves at one point.

    Args:
        point: The point.
        grads: Gradients at the point.
        calls: Calls of custom Functions at the point.
        outcomes: LeafOutcome by leaf.
    """

    point: Point
    grads: Gradients
    calls: list[RecordedCall]
    outcomes: dict[str, LeafOutcome]

    def names(self, *states: str) -> list[str]:
        """Return the leaves in one of some states."""
        return [n for n, o in self.outcomes.items() if o.state in states]


@final
class Judge:
    """Examine the leaves of a step.

    Args:
        step: The step.
        within: Time in seconds.
        allow: Names of custom Functions that may differ on purpose.
        given: Gradients to judge instead of the step's own, by name.
        names: Leaves to examine, or None for all.
        progress: Takes a text before each direction.
    """

    def __init__(
        self,
        step: CheckedStep,
        *,
        within: float,
        allow: Collection[str] = (),
        given: Mapping[str, Tensor] | None = None,
        names: Sequence[str] | None = None,
        progress: Callable[[str], None] = ignore_progress,
    ) -> None:
        self.step = step
        self._progress, self._begun = progress, 0
        self.names = list(step.leaves) if names is None else list(names)
        self.generator = torch.Generator().manual_seed(0)
        self.begin = time.monotonic()
        self.deadline = self.begin + within
        self.directions, self.points, self.kinks = 0, 0, 0
        self.is_second = False
        self._allow = frozenset(allow)
        self._given = dict(given or {})
        log = CallLog()
        with followed(log):
            first = self.gradients()
        self.calls = log.calls
        started = time.monotonic()
        self.noise = step.decide_graph(first.loss)
        per_direction = (time.monotonic() - started) * RUNS_PER_DIRECTION
        self.joint = per_direction * len(self.names) > LEAF_BY_LEAF_FRAC * within
        self.groups = max(1, int(GROUPS_FRAC * within / per_direction)) if self.joint else 1
        self.first = first

    @property
    def is_late(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() > self.deadline

    def is_allowed(self, function: type[Function]) -> bool:
        """Return whether a Function may differ on purpose."""
        return is_deliberate(function) or function.__name__ in self._allow

    def gradients(self) -> Gradients:
        """Return the gradients to judge, at the point where the step stands."""
        grads = self.step.gradients()
        if self._given and self.step.point is self.step.home:
            grads.by_name.update(self._given)
        return grads

    def examine(
        self,
        names: Sequence[str],
        point: Point,
        *,
        hold: Callable[[type[Function]], bool] = lambda function: False,
        cuts: list[Cut] | None = None,
        held_cuts: Collection[int] = (),
        grads: Gradients | None = None,
        joint: bool = False,
        groups: int = 1,
    ) -> Examined:
        """Compare leaves at a point.

        Args:
            names: Leaves.
            point: The point.
            hold: Whether a Function counts as its backward declares, in addition to those that are allowed.
            cuts: Cuts of the graph at the point, recorded before.
            held_cuts: Positions of the cuts whose values are kept.
            grads: Gradients to judge, or None for the step's own.
            joint: Whether to move all leaves together.
            groups: Number of groups to move them in instead.
        """
        self.step.move(point)
        log = CallLog()
        if point is self.step.home and not self.is_second and grads is None:
            found, log.calls = self.first, self.calls
        else:
            with followed(log):
                found = self.gradients()
        held = {c.index: c for c in log.calls if c.ran_backward and (self.is_allowed(c.function) or hold(c.function))}
        again = CallLog(held=held, copies=False)
        mode = GraphCuts(again, held=held_cuts, first=cuts, fills=self.step.fills) if cuts is not None else None
        with contextlib.ExitStack() as stack:
            if held or mode:
                stack.enter_context(followed(again))
            if mode:
                stack.enter_context(self.step.inside(mode.watching))
            comparison = LeafComparison(
                self.step, grads or found, again, self.generator, noise=self.noise, begin=self._report_progress
            )
            outcomes = comparison.all(names, deadline=self.deadline, joint=joint, groups=groups)
        self.directions += comparison.directions
        return Examined(point, grads or found, log.calls, outcomes)

    def _report_progress(self) -> None:
        """Report the progress as time, since the number of directions is not known in advance."""
        self._begun += 1
        elapsed, within = time.monotonic() - self.begin, self.deadline - self.begin
        self._progress(f"direction {self._begun}, {elapsed:.0f} of at most {within:.0f} s")

    def comparison(self, found: Examined) -> LeafComparison:
        """Return a comparison at the point of an examination, for the caller's own directions."""
        self.step.move(found.point)
        return LeafComparison(self.step, found.grads, CallLog(), self.generator, noise=self.noise)

    def recorded_cuts(self, point: Point) -> GraphCuts:
        """Return the cuts and writes of one run at a point."""
        self.step.move(point)
        log = CallLog(copies=False)
        mode = GraphCuts(log, fills=self.step.fills)
        with followed(log), self.step.inside(mode.watching):
            self.step.gradients()
        return mode

    def tensors(self) -> Examined:
        """Return the outcome of every leaf: wrong only if it is wrong at two points."""
        home = self.examine(self.names, self.step.home, joint=self.joint, groups=self.groups)
        self.points = 1
        if not self._given:
            self._after_one_step()
        near = self._near(home)
        bad = [n for n in self.names if n in home.outcomes and home.outcomes[n].state != "right"]
        if near is None:
            return home
        self.kinks += len(home.names("kink"))
        if bad:
            retried = self._retry(bad, home, near)
            home.outcomes.update(retried)
        late = [n for n, o in near.outcomes.items() if o.state == "wrong" and home.outcomes[n].state == "right"]
        if late:
            self.step.move(near.point)
            confirmed = self.examine(late, near.point)
            for name in confirmed.names("wrong"):
                home.outcomes[name] = confirmed.outcomes[name]
                home.point, home.calls, home.grads = confirmed.point, confirmed.calls, confirmed.grads
        return home

    def _after_one_step(self) -> None:
        """Begin from the state after one step: values that the first call keeps must not be used in the second."""
        self.step.move(self.step.home)
        self.is_second = True
        try:
            self.step.gradients()
            self.step.remember()
            self.step.gradients()
        except RuntimeError:  # an attribute holds a graph, which is freed by now
            self.step.forget()

    def _near(self, home: Examined) -> Examined | None:
        """Return the comparison at a point nearby; None for given gradients, which hold at one point."""
        if self._given or self.is_late:
            return None
        point = self.step.moved(self.generator, JITTER_FRAC)
        self.points += 1
        found = self.examine(self.names, point, joint=True)
        if found.names("right") and len(found.names("right")) == len(self.names):
            return found
        return found if self.joint else self.examine(self.names, point)

    def _retry(self, bad: list[str], home: Examined, near: Examined) -> dict[str, LeafOutcome]:
        """Return better outcomes for leaves that were not right at the first point."""
        better: dict[str, LeafOutcome] = {}
        for name in bad:
            there = near.outcomes.get(name)
            if there is not None and there.state == "right":
                better[name] = there if home.outcomes[name].state in ("kink", "noisy") else home.outcomes[name]
        undecided = [n for n in bad if n not in better and near.outcomes.get(n) and near.outcomes[n].state != "wrong"]
        for others in (False, True):
            if not undecided or self.is_late:
                break
            self.points += 1
            with contextlib.suppress(RuntimeError, ValueError, IndexError):  # other values of a batch may be refused
                found = self.examine(undecided, self.step.moved(self.generator, JITTER_FRAC, others=others))
                better.update({n: found.outcomes[n] for n in found.names("right", "wrong")})
            undecided = [n for n in undecided if n not in better]
        return better | self._only_here(bad, better, near)

    def _only_here(self, bad: list[str], better: Mapping[str, LeafOutcome], near: Examined) -> dict[str, LeafOutcome]:
        """Judge leaves again that are wrong at the first point and right near it: a kink that was not recognized."""
        doubtful = [
            n
            for n in bad
            if n in better
            and better[n].state == "wrong"
            and near.outcomes[n].state == "right"
            and math.isfinite(better[n].analytic)
        ]
        return {n: dataclasses.replace(better[n], state="kink") for n in doubtful}
