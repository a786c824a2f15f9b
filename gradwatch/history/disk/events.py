"""Read and write events.jsonl, one event per line."""

from __future__ import annotations

from typing import Any

from gradwatch.events import read_event
from gradwatch.history.disk.jsonl import JsonLines, encode_number
from gradwatch.records import Event


def _encode(event: Event) -> dict[str, Any]:
    data = event.to_json()
    return data | {"values": {name: encode_number(value) for name, value in data["values"].items()}}


def _decode(data: dict[str, Any]) -> Event:
    return read_event(data | {"values": {str(name): float(value) for name, value in data["values"].items()}})


EVENTS = JsonLines(name="events.jsonl", noun="event", encode=_encode, decode=_decode)
