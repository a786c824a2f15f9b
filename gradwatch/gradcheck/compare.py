"""Compare the gradient of each leaf with differences of the loss along random directions, alone or in groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from gradwatch.gradcheck.differences import Slope, kink, slope, unit_of
from gradwatch.gradcheck.stepping.function_calls import CallLog
from gradwatch.gradcheck.stepping.step import CheckedStep, Gradients
from gradwatch.gradcheck.stepping.tensors import inner, norm, random_like, scale_of

State = Literal["right", "wrong", "kink", "flat", "noisy"]
MAX_RIGHT_ERROR = 1e-5
"""Relative error up to which a gradient is right; the error of the differences is added 5 times."""
MIN_WRONG_ERROR = 1e-4
"""Relative error from which a gradient is wrong; the error of the differences is added 10 times."""
MIN_NOISY_ERROR = 1e-2
"""Relative error of the differences from which they do not decide."""
NEGLIGIBLE_FRAC = 1e-9
"""Share of the largest gradient of the step that counts as 0."""

MAX_STRETCH = 30.0
"""Factor by which a leaf with a small gradient may be moved further than others in one direction."""


@final
@dataclass(frozen=True, slots=True)
class LeafOutcome:
    """The comparison along one direction.

    Args:
        state: right, wrong, at a kink, flat (the loss does not change), or too noisy.
        analytic: Derivative by the gradients.
        slope: Derivative by differences.
        reference: Magnitude that errors are relative to.
        shifts: The direction.
        parts: Usual size of each leaf's part in the derivative.
        floor: Difference that counts as 0 next to the largest gradient of the step.
    """

    state: State
    analytic: float
    slope: Slope
    reference: float
    shifts: Mapping[str, Tensor]
    parts: Mapping[str, float]
    floor: float = 0.0

    @property
    def error(self) -> float:
        """Return the relative error; infinite if one of the two is not finite."""
        difference = abs(self.analytic - self.slope.value)
        if not math.isfinite(difference):
            return math.inf
        return difference / self.reference if self.reference else 0.0

    def visible(self, name: str) -> float:
        """Return the smallest relative mistake in the gradient of a leaf that would have been seen.

        It is infinite if the gradient counts as 0: nothing of it could be seen.
        """
        part, least = self.parts[name], self._least_difference
        return least / part if part > least else math.inf

    def visible_norm(self, name: str) -> float:
        """Return the norm of the smallest mistake in the gradient of a leaf that would have been seen."""
        size = _rms(self.shifts[name])
        return self._least_difference / size if size else math.inf

    @property
    def _least_difference(self) -> float:
        return MIN_WRONG_ERROR * self.reference + 10 * self.slope.error + self.floor

    @property
    def noise(self) -> float:
        """Return the relative error of the differences."""
        return self.slope.error / self.reference if self.reference else 0.0


@final
class LeafComparison:
    """Compare gradients at the point where a step stands.

    Args:
        step: The step.
        grads: Its gradients at the point.
        log: Log of custom Functions; calls that it holds count as their backward declares.
        generator: Source of the directions.
        noise: Measured noise of the loss.
        begin: Called before each direction.
    """

    def __init__(
        self,
        step: CheckedStep,
        grads: Gradients,
        log: CallLog,
        generator: torch.Generator,
        *,
        noise: float = 0.0,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.step, self.grads, self.log = step, grads, log
        self.noise = noise
        self._begin = begin
        self.directions = 0
        self._generator = generator
        values = step.point.leaves
        self.typical = {n: norm(g) * scale_of(values[n]) for n, g in grads.by_name.items()}
        largest = max((t for t in self.typical.values() if math.isfinite(t)), default=0.0)
        # float64 by default; in float32, rounding inside the step is as much larger as the epsilon
        self._floor = NEGLIGIBLE_FRAC * largest * max(1.0, step.epsilon / torch.finfo(torch.float64).eps * 1e-3)

    def along(self, names: Sequence[str]) -> LeafOutcome:
        """Compare along one random direction of some leaves, each moved in proportion to its size."""
        if self._begin is not None:
            self._begin()
        values = self.step.point.leaves
        shifts = {n: scale_of(values[n]) * random_like(values[n], self._generator) for n in names}
        if len(names) > 1:  # equal parts of the derivative, so that no leaf hides another
            largest = max(self.typical[n] for n in names) or 1.0
            shifts = {n: v * min(largest / (self.typical[n] or largest), MAX_STRETCH) for n, v in shifts.items()}
        self.directions += 1
        return self.by_shift(shifts)

    def by_shift(self, shifts: Mapping[str, Tensor]) -> LeafOutcome:
        """Compare along given shifts of leaves."""
        analytic = math.fsum(inner(self.grads.by_name[n], v) for n, v in shifts.items())
        parts = {n: norm(self.grads.by_name[n]) * _rms(v) for n, v in shifts.items()}
        typical = math.sqrt(sum(part**2 for part in parts.values()))

        def function(multiple: float) -> float:
            self.log.begin()
            return self.step.loss(shifts, multiple) + self.log.surrogate

        unit = unit_of(self.grads.loss, max(typical, abs(analytic)))
        found = slope(
            function,
            typical=typical if math.isfinite(typical) else 0.0,
            epsilon=self.step.epsilon,
            noise=self.noise,
            expected=analytic,
            unit=unit,
        )
        reference = max(abs(analytic), abs(found.value), typical)
        state = self._state(analytic, found, reference)
        if state in ("wrong", "noisy") and kink(
            function, at=function(0.0), typical=reference, epsilon=self.step.epsilon, unit=unit
        ):
            state = "kink"
        return LeafOutcome(state, analytic, found, reference, shifts, parts, self._floor)

    def _state(self, analytic: float, found: Slope, reference: float) -> State:
        if not math.isfinite(analytic):
            return "wrong" if math.isfinite(found.value) else "noisy"
        if not math.isfinite(found.value):
            return "noisy"
        difference = abs(analytic - found.value)
        if difference <= MAX_RIGHT_ERROR * reference + 5 * found.error + self._floor and (
            found.error <= MIN_NOISY_ERROR * reference + self._floor
        ):
            return "right"
        if found.flat:
            return "flat"
        if difference > MIN_WRONG_ERROR * reference + 10 * found.error + self._floor:
            return "wrong"
        return "noisy"

    def all(self, names: Sequence[str], *, deadline: float, joint: bool, groups: int = 1) -> dict[str, LeafOutcome]:
        """Compare leaf by leaf, or all at once and in halves where that disagrees; stops at the deadline.

        Args:
            names: Leaves.
            deadline: Time at which to stop.
            joint: Whether to move several leaves together.
            groups: Number of groups to move them in, of gradients of similar size, so that none hides another.
        """
        if joint and groups > 1:
            order = sorted(names, key=lambda n: self.typical[n])
            size = math.ceil(len(order) / groups)
            chunks = [order[i : i + size] for i in range(0, len(order), size)]
            return {n: o for part in chunks for n, o in self.all(part, deadline=deadline, joint=True).items()}
        if not joint:
            found: dict[str, LeafOutcome] = {}
            for name in names:
                if time.monotonic() > deadline and found:
                    break
                found[name] = self.along([name])
            return found
        outcome = self.along(names)
        if outcome.state == "right" or len(names) == 1 or time.monotonic() > deadline:
            return dict.fromkeys(names, outcome)
        half = len(names) // 2
        parts = (names[:half], names[half:])
        return {n: o for part in parts for n, o in self.all(part, deadline=deadline, joint=True).items()}


def _rms(tensor: Tensor) -> float:
    return norm(tensor) / math.sqrt(max(tensor.numel(), 1))
