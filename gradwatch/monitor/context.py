"""Share settings, counters, clocks and the pipeline between the parts of one monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from gradwatch.attempts import Attempts
from gradwatch.monitor.accumulation import StepCounter
from gradwatch.monitor.budget import Budget
from gradwatch.monitor.one_time_events import OneTimeEvents
from gradwatch.monitor.overhead import OverheadMeter
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.inspections import Inspections


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorContext:
    """The state that the parts of a monitor share.

    Args:
        pipeline: Receives rows and events.
        budget: Schedules the sampled statistics.
        meter: All clocks.
        events: One-time events of the run.
        facts: Inspects graph and modes, or None.
        accumulate: As in `Monitor`.
        is_hooked: As in `Monitor`.
        is_deferred: As in `Monitor`.
        counter: Counts steps and updates.
    """

    pipeline: Pipeline
    budget: Budget
    meter: OverheadMeter
    events: OneTimeEvents
    facts: Inspections | None
    accumulate: int
    is_hooked: bool
    is_deferred: bool
    counter: StepCounter = field(default_factory=StepCounter)

    @property
    def attempts(self) -> Attempts:
        """Counts the failures of the parts that work on the training thread."""
        return self.pipeline.attempts
