"""Find averages with running statistics that nothing updates, and teachers that drop features at random."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.events import COPY_STATISTICS, MODE_TEACHER
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity, Severity


def find_stale_copies(
    detector: HasCode, history: History, *, shift: float, spread: float, far: int
) -> Iterator[Finding]:
    """Yield each copy whose weights follow the model while its running statistics stay, if these differ much.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        shift: Distance of the means of copy and model, in standard deviations, in half of the channels.
        spread: Ratio of the variances of copy and model, in half of the channels.
        far: Looks at an evaluated copy that must find such a distance.
    """
    distant = [
        event
        for event in events_of(history, COPY_STATISTICS)
        if event.values["shift"] >= shift or event.values["log of spread"] >= math.log(spread)
    ]
    for layer in dict.fromkeys(event.layer for event in distant):
        events = [event for event in distant if event.layer == layer]
        if len(events) >= far:
            yield finding_of(
                detector,
                history,
                f"{events[-1].text}: it is evaluated with those of its first step",
                Quantity(key="copy.shift", label="shift of the statistics", value=events[-1].values["shift"]),
                Quantity(key="copy.spread", label="log of the spread", value=events[-1].values["log of spread"]),
                layer=layer,
                onset=events[0].step,
                severity=Severity.WARNING,
            )


def find_dropping_teachers(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield each frozen module that gets the inputs of a trained one and drops features at random."""
    for event in events_of(history, MODE_TEACHER):
        yield finding_of(
            detector,
            history,
            event.text,
            Quantity(key="teacher.dropouts", label="dropouts in training mode", value=event.values["dropouts"]),
            layer=event.layer,
            onset=max(0, event.step - int(event.values["calls"])),
            severity=Severity.WARNING,
        )
