"""Find models whose pretrained weights were not loaded: the names in the file differ, and `strict=False` hid it.

Seen by `gradwatch run` only: `watch` is called after the load.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.events import WEIGHTS_NOT_LOADED
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity

UNMATCHED = "load.unmatched"
"""Key of the number of tensors that a load found no parameter for."""


def find_failed_loads(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the modules that stay as they were initialized although weights were loaded into them."""
    for event in events_of(history, WEIGHTS_NOT_LOADED):
        unmatched = Quantity(key=UNMATCHED, label="loaded tensors without a parameter", value=event.values["tensors"])
        yield finding_of(detector, history, event.text, unmatched, layer=event.layer)
