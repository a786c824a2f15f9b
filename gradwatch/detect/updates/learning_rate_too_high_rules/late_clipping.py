"""Find gradients that the loop clips after the updates that used them, so that no update is limited."""

from __future__ import annotations

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import CLIPPED_LATE
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_late_clipping(history: History, *, limited: float) -> Sign | None:
    """Return the sign of gradients that were clipped after their updates, if that would have limited an update.

    Args:
        history: History of the run.
        limited: Factor of the clipping up to which an update would have been limited. Clipping of values is below it.
    """
    for event in events_of(history, CLIPPED_LATE):
        factor, updates = event.values["factor"], event.values["updates"]
        if factor <= limited:
            evidence = [Quantity(key="clip.late_updates", label="clipped too late", value=updates, unit="updates")]
            if factor >= 0:
                evidence.append(Quantity(key="clip.factor", label="smallest factor of the clipping", value=factor))
            return Sign(
                "no update is limited: the gradients are clipped after the update that used them",
                tuple(evidence),
                since=int(history.steps("loss")[0]),
            )
    return None
