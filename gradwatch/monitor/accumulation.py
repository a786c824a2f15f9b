"""Count steps and updates, and learn how many calls of `Monitor.step` make one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gradwatch.monitor.best_effort import warn_once


@final
@dataclass(slots=True)
class StepCounter:
    """Counts steps and updates. The counts are out of date while the fast path is active.

    Args:
        step: The optimizer step in progress.
        updates: Updates of the steps before it.
    """

    step: int = 0
    updates: int = 0


@final
class AccumulationTracker:
    """Learns the number of calls between two updates.

    Args:
        accumulate: Up to this many calls are the micro-batches of one update.

    Attributes:
        calls: Calls since the last row.
    """

    def __init__(self, accumulate: int) -> None:
        self.warned: set[str] = set()
        self.calls = 0
        self._accumulate = accumulate
        # an interval of 1 until proven otherwise, so that a run starts on the fast path
        self._calls_without_update, self._interval = 0, 1

    @property
    def is_one_step_per_call(self) -> bool:
        """Return whether every call so far followed an update."""
        return self._interval == 1 and not self._calls_without_update

    @property
    def is_full(self) -> bool:
        """Return whether the calls since the last row reach the number of micro-batches per update."""
        return self.calls >= self._accumulate

    def learn(self, *, is_updated: bool) -> None:
        """Learn from a call. Two equal intervals between updates in a row count as accumulation."""
        if not is_updated:
            # the calls before the last micro-batch of `accumulate` are declared, not learned
            self._calls_without_update += self.is_full
            return
        interval, self._calls_without_update = self._calls_without_update + 1, 0
        if interval == self._interval > 1:  # a single long interval may be a skipped update
            self._accumulate *= interval
            calls = self._accumulate
            text = (
                f"`optimizer.step()` runs once per {calls} calls of `monitor.step()`; they are now merged into one "
                f"row. Call `monitor.step()` only after `optimizer.step()`, or pass `accumulate={calls}`."
            )
            warn_once(self.warned, "accumulation", text)
        self._interval = interval
