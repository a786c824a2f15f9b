"""Find steps that all draw the same random numbers, since each seeds the generators."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import DRAWS_REPEATED
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_repeated_draws(history: History) -> Iterator[Sign]:
    """Yield a sign if many steps in a row began with the same seed."""
    for event in events_of(history, DRAWS_REPEATED):
        steps = Quantity(key="draws.repeated_steps", label="steps with the same draws", value=event.values["steps"])
        yield Sign(event.text, (steps,), since=int(history.steps("loss")[0]), severity=Severity.WARNING)
