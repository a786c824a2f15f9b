"""Read the events of a run, which describe it in addition to its statistics."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.events import PADDED_INPUT, PADDING_READ, EventKind
from gradwatch.history.store import History
from gradwatch.records import Event


def events_of(history: History, kind: EventKind) -> Iterator[Event]:
    """Yield the events of a kind up to the newest step, in recording order."""
    for event in history.events:
        if event.kind == kind.name and event.step <= history.step:
            yield event


def reads_padding(history: History, layer: str) -> bool:
    """Return whether a module, or the module of a tensor, may read padding, so that its gradient vanishes."""
    events = (*events_of(history, PADDING_READ), *events_of(history, PADDED_INPUT))
    return any(event.layer and f"{layer}.".startswith(f"{event.layer}.") for event in events)
