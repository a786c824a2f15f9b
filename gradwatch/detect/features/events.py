"""What was noted of a run besides its statistics, as far as it has come."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.history.store import History
from gradwatch.records import Event

HEADS = "graph-heads"
"""Event of several last layers that share what lies before them; its values are their places in the model."""

PRODUCT = "graph-embedding-product"
"""Event of rows of two tables that are multiplied; its values are the tables' places and the length of a row."""


def noted(history: History, kind: str) -> Iterator[Event]:
    """Yield the events of a kind up to the newest step, in the order in which they were noted."""
    for event in history.events:
        if event.kind == kind and event.step <= history.step:
            yield event
