"""Limit the fraction of the elapsed time that an activity may take."""

from __future__ import annotations

from typing import final


@final
class TimeQuota:
    """Compares the time spent on an activity with its allowed fraction of the elapsed time.

    Args:
        fraction: Allowed fraction of the elapsed time, 0..1.
        expected_s: Expected seconds of the first activity.

    Attributes:
        spent_s: Seconds spent so far.
    """

    def __init__(self, fraction: float, *, expected_s: float = 0.0) -> None:
        self.spent_s = 0.0
        self._fraction = fraction
        self._last_s = expected_s  # the estimate for the next activity

    def charge(self, seconds: float) -> None:
        """Add the time of one activity."""
        self.spent_s += seconds
        self._last_s = seconds

    def reset(self) -> None:
        """Reset the spent time."""
        self.spent_s = 0.0

    def remaining_s(self, elapsed_s: float) -> float:
        """Return the seconds that are left within the quota."""
        return self._fraction * elapsed_s - self.spent_s

    def allows_another(self, elapsed_s: float, *, grace_s: float = 0.0) -> bool:
        """Return whether another activity of the last duration would be within the quota.

        Args:
            elapsed_s: Seconds since the beginning.
            grace_s: Seconds that are allowed in advance.
        """
        return self.spent_s + self._last_s <= grace_s + self._fraction * elapsed_s

    @property
    def pause_s(self) -> float:
        """Seconds between the last activity and the next at which the quota is kept."""
        return self._last_s / self._fraction
