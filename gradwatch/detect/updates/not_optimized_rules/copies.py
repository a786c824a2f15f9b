"""Find copies of trained weights that the loop writes and does not update, such as a target network."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.events import COPY_UNCHANGED
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity, Severity

WRITTEN = "copy.steps"
"""Key of the evidence that a copy is written and keeps its values."""


def find_unchanged_copies(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the copies of trained weights that are written again and again and keep their values."""
    for event in events_of(history, COPY_UNCHANGED):
        steps, distance = event.values["steps"], event.values["distance"]
        yield finding_of(
            detector,
            history,
            event.text,
            Quantity(key=WRITTEN, label="steps with the same values", value=steps, unit="steps"),
            Quantity(key="copy.distance", label="distance of trained weights / size of the copy", value=distance),
            layer=event.layer,
            onset=int(event.step - steps),
            severity=Severity.WARNING,
        )
