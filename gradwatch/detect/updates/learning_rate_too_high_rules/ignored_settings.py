"""Find settings that should freeze weights or lower the learning rate, and that torch does not read."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import FREEZE_IGNORED, RATE_IGNORED
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_ignored_settings(history: History) -> Iterator[Sign]:
    """Yield the sign of each attribute that has no effect on the updates."""
    for event in events_of(history, FREEZE_IGNORED):
        tensors = Quantity(key="tensors", value=event.values["tensors"])
        yield Sign(event.text, (tensors,), since=event.step, layer=event.layer)
    for event in events_of(history, RATE_IGNORED):
        evidence = (
            Quantity(key="lr.wanted", label="rate of the attribute", value=event.values["wanted"]),
            Quantity(key="lr.0", value=event.values["rate"]),
        )
        yield Sign(event.text, evidence, since=event.step)
