"""Limit how often a kind of output is written: every N steps, within a quota of the training time."""

from __future__ import annotations

from typing import final

from gradwatch.time_quota import TimeQuota

GRACE_S = 0.005
"""Default seconds that each kind of output may take beyond its quota, so that a short run has output too."""


@final
class Throttle:
    """Decides when one kind of output is due and within its quota.

    Args:
        every: Optimizer steps between two outputs; 0 for never.
        fraction: Share of the training time that the output may take.
        first: First step at which the output is due.
        expected_s: Expected seconds of the first output. With 0, the first output is always granted.
        grace_s: Seconds that the output may take beyond its quota; None for `GRACE_S`.

    Attributes:
        next: Next step at which the output is due.
        quota: Time that the output has taken and may take.
    """

    def __init__(
        self, every: int, *, fraction: float, first: int = 0, expected_s: float = 0.0, grace_s: float | None = None
    ) -> None:
        self.every = every
        self.quota = TimeQuota(fraction, expected_s=expected_s)
        self.next: float = first if every else float("inf")
        self._first = first
        self._grace_s = grace_s

    def grants(self, step: int, *, elapsed_s: float) -> bool:
        """Return whether the output is due at a step and within its quota.

        An output that is due but beyond its quota is skipped until the next multiple of `every`.

        Args:
            step: Newest optimizer step.
            elapsed_s: Seconds that the steps have taken so far.
        """
        if step < self.next:
            return False
        # to a multiple of `every`, also if the caller has skipped steps
        self.next = step - step % self.every + self.every
        return self.quota.allows_another(elapsed_s, grace_s=GRACE_S if self._grace_s is None else self._grace_s)

    def rewind(self, step: int) -> None:
        """Make the output due again from `step`, after a rewind of the run to that step."""
        if self.every:
            # `-(-a // b)` rounds up: the first multiple of `every` that is not before `step`
            self.next = min(self.next, max(self._first, -(-step // self.every) * self.every))
