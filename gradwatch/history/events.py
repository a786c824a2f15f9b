"""events.jsonl: an event per line, with the step at which it was written."""

from __future__ import annotations

from typing import Any

from gradwatch.history.lines import Lines, number
from gradwatch.records import Event

MOST = 1000
"""Events that a history holds: enough for what a person reads, and bounded whatever notes them."""


def closing(step: int) -> Event:
    """Return the event that says that there were more than a history holds."""
    return Event(kind="events-dropped", step=step, text=f"there were more than {MOST} events; later ones are not kept")


def _encode(event: Event) -> dict[str, Any]:
    data = event.to_json()
    return data | {"values": {name: number(value) for name, value in data["values"].items()}}


def _decode(data: dict[str, Any]) -> Event:
    return Event.from_json(data | {"values": {str(name): float(value) for name, value in data["values"].items()}})


EVENTS = Lines(name="events.jsonl", noun="event", encode=_encode, decode=_decode)
