"""Measure the overhead of a monitor and the time of the training steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from gradwatch import _native


class RowCost(NamedTuple):
    """The cost of one row in seconds.

    Args:
        host_s: Overhead on the thread of the training.
        optional_s: Part of `host_s` spent on sampled statistics.
        wall_s: Time since the end of the previous row.
    """

    host_s: float
    optional_s: float
    wall_s: float


@final
class OverheadMeter:
    """Owns all clocks of a monitor, except for the clocks that the fast path keeps while it is active.

    Args:
        pipeline_cpu_s: Returns the processor time that the pipeline has used so far.

    Attributes:
        hooks_s: Seconds spent in hooks and `observe` since the row began.
        optional_s: Seconds spent on sampled statistics since the row began.
        carried_s: Overhead in seconds after the last row ended, which is charged to the next row.
        step_began: Clock at which the step in progress began: the end of the last call of the monitor.
        row_ended: Clock at which the last row ended.
    """

    def __init__(self, pipeline_cpu_s: Callable[[], float]) -> None:
        self._pipeline_cpu_s = pipeline_cpu_s
        self._charged_pipeline_s = pipeline_cpu_s()  # time before this monitor is not charged
        self.hooks_s = self.optional_s = self.carried_s = 0.0
        self.step_began = self.row_ended = time.perf_counter()

    def begin_row(self) -> None:
        """Reset the counts for the next row."""
        self.hooks_s = self.optional_s = 0.0

    def begin_step(self) -> None:
        """Mark the start of the next step."""
        self.step_began = time.perf_counter()

    def end_row(self, began: float) -> RowCost:
        """Return the cost of the row so far, and start the wall time of the next row.

        Args:
            began: Clock at which `Monitor.step` was called.
        """
        now = time.perf_counter()
        cost = RowCost(self.carried_s + self.hooks_s + now - began, self.optional_s, now - self.row_ended)
        self.row_ended = now
        return cost

    def carry_over(self, waited_s: float) -> None:
        """Charge the next row for the time since the last row ended.

        Args:
            waited_s: Time for which the training waited for the pipeline. It counts as time of the pipeline.
        """
        # the end of a row measures its own cost, so the work after it belongs to no row yet
        self.carried_s = self.step_began - self.row_ended - waited_s

    def pipeline_s(self) -> float:
        """Return the processor time that the pipeline has used since the last call."""
        before, self._charged_pipeline_s = self._charged_pipeline_s, self._pipeline_cpu_s()
        return self._charged_pipeline_s - before

    def hand_over(self, native: _native.FastPath) -> None:
        """Move the clocks to the fast path."""
        native.carried_s, native.step_began, native.row_ended = self.carried_s, self.step_began, self.row_ended

    def take_back(self, native: _native.FastPath) -> None:
        """Move the clocks back from the fast path."""
        self.carried_s, self.step_began, self.row_ended = native.carried_s, native.step_began, native.row_ended
        self.hooks_s += native.hooks_s
