"""events.jsonl: an event per line, with the step at which it was written."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gradwatch.history import files
from gradwatch.records import Event

NAME = "events.jsonl"

MOST = 1000
"""Events that a history holds: enough for what a person reads, and bounded whatever notes them."""


def line(event: Event, *, at: int) -> bytes:
    """Return an event as a line of JSON.

    Args:
        event: What was noted.
        at: Newest step of the history when it was.
    """
    data = event.to_json()
    data["step"] = int(data["step"])
    values = {name: float(value) for name, value in data["values"].items()}
    # JSON has no nan and no infinity
    data["values"] = {n: value if math.isfinite(value) else str(value) for n, value in values.items()}
    return json.dumps({"at": at} | data, allow_nan=False).encode() + b"\n"


def closing(step: int) -> Event:
    """Return the event that says that there were more than a history holds."""
    return Event(kind="events-dropped", step=step, text=f"there were more than {MOST} events; later ones are not kept")


def read(directory: Path, *, until: int | None = None) -> tuple[list[Event], list[str]]:
    """Read the events in the order in which they were noted. One that a kill has cut off is left out, without a word.

    Args:
        directory: A run directory. One of an older gradwatch has no events.
        until: Leave out those of later steps, and those written after this step.

    Returns:
        The events, and what is damaged, a sentence each.
    """
    kept, problems = _parse(directory / NAME, until)
    return [event for _, event in kept], problems


def truncate(directory: Path, *, until: int) -> None:
    """Delete the events of later steps than one, those that were written after it, and lines that are none."""
    kept, _ = _parse(directory / NAME, until)
    if (directory / NAME).exists():
        files.replace(directory / NAME, b"".join(line(event, at=at) for at, event in kept))


def _parse(path: Path, until: int | None) -> tuple[list[tuple[int, Event]], list[str]]:
    if not path.exists():
        return [], []
    *texts, _unfinished = path.read_bytes().split(b"\n")
    kept, problems = [], []
    for number, text in enumerate(texts, start=1):
        try:
            data = json.loads(text)
            at = int(data.pop("at"))
            data["values"] = {str(name): float(value) for name, value in data["values"].items()}
            event = Event.from_json(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path}, line {number} is no event: {type(error).__name__}: {error}")
            continue
        if until is None or max(at, event.step) <= until:
            kept.append((at, event))
    return kept, problems
