"""Read the events of a run, which describe it besides its statistics."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.history.store import History
from gradwatch.records import Event

HEADS_EVENT = "tape-heads"
"""Event of several output layers that share the layers before them; its values are their indices."""

EMBEDDING_PRODUCT_EVENT = "tape-embedding-product"
"""Event of rows of two embeddings that are multiplied; its values are their indices and the length of a row."""

RECURRENCE_EVENT = "tape-recurrence"
"""Event of a gradient that grows or shrinks on its way back through the uses of one parameter."""


def events_of(history: History, kind: str) -> Iterator[Event]:
    """Yield the events of a kind up to the newest step, in the order in which they were recorded."""
    for event in history.events:
        if event.kind == kind and event.step <= history.step:
            yield event
