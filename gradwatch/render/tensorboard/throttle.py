"""How often something is shown: every so many steps, and never for more than its share of the training's time."""

from __future__ import annotations

from typing import final

GRACE_S = 0.005
"""Time that each share may take before it must have been earned: so that a short run is shown too."""


@final
class Share:
    """Says when one kind of output is due and affordable, from what it took before.

    Args:
        every: Optimizer steps between two outputs; 0 is never.
        fraction: Part of the training's time that it may take.
        first: Step at which it is due first.
        expected_s: What the first output is taken to cost; 0 grants it in any case.

    Attributes:
        next: First step at which it is due again.
        spent_s: Time that it took so far.
    """

    def __init__(self, every: int, *, fraction: float, first: int = 0, expected_s: float = 0.0) -> None:
        self.every = every
        self.fraction = fraction
        self.next: float = first if every else float("inf")
        self.spent_s = 0.0
        self._first = first
        self._last_s = expected_s

    def grants(self, step: int, *, elapsed_s: float) -> bool:
        """Say whether it is due at a step and its time is earned; where it is due only, it is left out this time.

        Args:
            step: Newest optimizer step.
            elapsed_s: Time that the steps took so far.
        """
        if step < self.next:
            return False
        self.next = step - step % self.every + self.every
        return self.spent_s + self._last_s <= GRACE_S + self.fraction * elapsed_s

    def rewind(self, step: int) -> None:
        """Be due again where it was due from a step on: the run went back to it."""
        if self.every:
            self.next = min(self.next, max(self._first, -(-step // self.every) * self.every))

    def charge(self, seconds: float) -> None:
        """Note what an output took."""
        self.spent_s += seconds
        self._last_s = seconds
