"""Find weights that two optimizers hold and move in opposite directions."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import OPTIMIZERS_OPPOSED
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_opposed_optimizers(history: History) -> Iterator[Sign]:
    """Yield the sign of each event about optimizers that undo the updates of each other."""
    for event in events_of(history, OPTIMIZERS_OPPOSED):
        yield Sign(
            event.text,
            (
                Quantity(key="updates.cosine", label="cosine of their gradients", value=event.values["cosine"]),
                Quantity(key="tensors", value=event.values["tensors"]),
            ),
            layer=event.layer,
            severity=Severity.WARNING,
        )
