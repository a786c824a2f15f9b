"""A limit on the share of the time that an activity may take."""

from __future__ import annotations

from typing import final


@final
class TimeQuota:
    """Compares the time that an activity has taken with its share of the elapsed time.

    Args:
        fraction: Share of the elapsed time, 0..1.
        expected_s: Expected seconds of the first activity.

    Attributes:
        spent_s: Seconds that the activity has taken so far.
    """

    def __init__(self, fraction: float, *, expected_s: float = 0.0) -> None:
        self.spent_s = 0.0
        self._fraction = fraction
        self._last_s = expected_s

    def charge(self, seconds: float) -> None:
        """Charge the quota with one activity."""
        self.spent_s += seconds
        self._last_s = seconds

    def reset(self) -> None:
        """Forget what was spent."""
        self.spent_s = 0.0

    def remaining_s(self, elapsed_s: float) -> float:
        """Return the seconds that the activity may still take."""
        return self._fraction * elapsed_s - self.spent_s

    def allows_another(self, elapsed_s: float, *, grace_s: float = 0.0) -> bool:
        """Return whether another activity, as long as the last one, would be within the quota.

        Args:
            elapsed_s: Seconds since the beginning.
            grace_s: Seconds that the activity may take before they are earned.
        """
        return self.spent_s + self._last_s <= grace_s + self._fraction * elapsed_s

    @property
    def pause_s(self) -> float:
        """Seconds to wait from one activity to the next, so that the last one stays within the quota."""
        return self._last_s / self._fraction
