"""The clocks of a monitor: how long watching takes, and how long the training's steps take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from gradwatch import _native


class RowCost(NamedTuple):
    """The time that one row took, in seconds.

    Args:
        host_s: Overhead on the training's thread.
        optional_s: Its part that was spent on sampled statistics.
        wall_s: Time since the row before.
    """

    host_s: float
    optional_s: float
    wall_s: float


@final
class OverheadMeter:
    """Owns all clocks of a monitor, but those that the fast path keeps while it is active.

    Args:
        pipeline_cpu_s: Returns the processor time that the pipeline has taken so far.

    Attributes:
        hooks_s: Seconds spent in hooks and `observe` since the row began.
        optional_s: Seconds spent on sampled statistics since the row began.
        carried_s: Seconds spent after the last row ended, which the next row is charged.
        step_began: Clock at which the step in progress began: the end of the monitor's last call.
        row_ended: Clock at which the last row ended.
    """

    def __init__(self, pipeline_cpu_s: Callable[[], float]) -> None:
        self._pipeline_cpu_s = pipeline_cpu_s
        self._charged_pipeline_s = pipeline_cpu_s()
        self.hooks_s = self.optional_s = self.carried_s = 0.0
        self.step_began = self.row_ended = time.perf_counter()

    def begin_row(self) -> None:
        """Start to count for the next row."""
        self.hooks_s = self.optional_s = 0.0

    def begin_step(self) -> None:
        """Mark the beginning of the next step."""
        self.step_began = time.perf_counter()

    def end_row(self, began: float) -> RowCost:
        """Return the cost of the row up to now.

        Args:
            began: Clock at which `Monitor.step` was called.
        """
        now = time.perf_counter()
        cost = RowCost(self.carried_s + self.hooks_s + now - began, self.optional_s, now - self.row_ended)
        self.row_ended = now
        return cost

    def carry_over(self, waited_s: float) -> None:
        """Charge the next row the time since the last row ended.

        Args:
            waited_s: The part in which the training waited for the pipeline, which counts as the pipeline's time.
        """
        self.carried_s = self.step_began - self.row_ended - waited_s

    def pipeline_s(self) -> float:
        """Return the processor time that the pipeline has taken since the last call."""
        before, self._charged_pipeline_s = self._charged_pipeline_s, self._pipeline_cpu_s()
        return self._charged_pipeline_s - before

    def hand_over(self, native: _native.FastPath) -> None:
        """Let the fast path keep the clocks."""
        native.carried_s, native.step_began, native.row_ended = self.carried_s, self.step_began, self.row_ended

    def take_back(self, native: _native.FastPath) -> None:
        """Keep the clocks again."""
        self.carried_s, self.step_began, self.row_ended = native.carried_s, native.step_began, native.row_ended
        self.hooks_s += native.hooks_s
