"""How often a kind of output is written: every N steps, within a quota of the training's time."""

from __future__ import annotations

from typing import final

from gradwatch.time_quota import TimeQuota

GRACE_S = 0.005
"""Seconds that each kind of output may take before they are earned, so that a short run is shown, too."""


@final
class Throttle:
    """Decides when one kind of output is due and within its quota.

    Args:
        every: Optimizer steps between two outputs; 0 is never.
        fraction: Share of the training's time that it may take.
        first: Step at which it is due first.
        expected_s: Expected seconds of the first output; with 0 the first output is always granted.

    Attributes:
        next: First step at which it is due again.
        quota: The time that it took so far, and may take.
    """

    def __init__(self, every: int, *, fraction: float, first: int = 0, expected_s: float = 0.0) -> None:
        self.every = every
        self.quota = TimeQuota(fraction, expected_s=expected_s)
        self.next: float = first if every else float("inf")
        self._first = first

    def grants(self, step: int, *, elapsed_s: float) -> bool:
        """Return whether it is due at a step and within its quota; if it is only due, it is skipped this time.

        Args:
            step: Newest optimizer step.
            elapsed_s: Time that the steps took so far.
        """
        if step < self.next:
            return False
        self.next = step - step % self.every + self.every
        return self.quota.allows_another(elapsed_s, grace_s=GRACE_S)

    def rewind(self, step: int) -> None:
        """Make it due again at the steps from `step`, to which the run went back."""
        if self.every:
            self.next = min(self.next, max(self._first, -(-step // self.every) * self.every))
