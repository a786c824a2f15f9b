"""Read and write files with one JSON object per line, each with the step of its writing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from gradwatch.history.disk import atomic
from gradwatch.records import Event, Finding

Item = TypeVar("Item", Finding, Event)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines(Generic[Item]):
    """A file of findings or events in a run directory.

    Args:
        name: File name in the run directory.
        noun: Noun for an item in the message about a damaged line.
        encode: Converts an item to plain data without infinite or nan numbers, which JSON does not have.
        decode: Converts plain data to an item. Raises ValueError, TypeError, KeyError or AttributeError if the data are
            damaged.
    """

    name: str
    noun: str
    encode: Callable[[Item], dict[str, Any]]
    decode: Callable[[dict[str, Any]], Item]

    def line(self, item: Item, *, at: int) -> bytes:
        """Return an item as a line of JSON.

        Args:
            item: A finding or an event.
            at: Newest step of the history when the item was created. It may be later than the step of the item.
        """
        data = {"at": at} | self.encode(item) | {"step": int(item.step)}
        return json.dumps(data, allow_nan=False).encode() + b"\n"

    def read(self, directory: Path, *, until: int | None = None) -> tuple[list[Item], list[str]]:
        """Read all items in the order of writing. An unfinished last line is ignored.

        Args:
            directory: A run directory.
            until: Newest step to read; items of later steps and items written after it are skipped. None for all.

        Returns:
            The items, and a sentence about each damaged line.
        """
        kept, problems = self._parse(directory / self.name, until)
        return [item for _, item in kept], problems

    def truncate(self, directory: Path, *, until: int | None) -> None:
        """Delete the items of steps after `until`, the items written after it, and damaged lines.

        None deletes only damaged lines.
        """
        path = directory / self.name
        kept, _ = self._parse(path, until)
        atomic.replace(path, b"".join(self.line(item, at=at) for at, item in kept))

    def _parse(self, path: Path, until: int | None) -> tuple[list[tuple[int, Item]], list[str]]:
        if not path.exists():
            return [], []
        # the text after the last newline is empty, or a line that a killed process did not finish
        *texts, _unfinished = path.read_bytes().split(b"\n")
        kept, problems = [], []
        for number, text in enumerate(texts, start=1):
            try:
                data = json.loads(text)
                at = int(data.pop("at"))
                item = self.decode(data)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                # reported and skipped: one damaged line must not hide the others
                problems.append(f"{path}, line {number} is not a valid {self.noun}: {type(error).__name__}: {error}")
                continue
            # `at` as well: a more severe finding keeps the step of the first one, but was found later
            if until is None or max(at, item.step) <= until:
                kept.append((at, item))
        return kept, problems


def encode_number(value: float) -> float | str:
    """Convert a number for JSON: `nan`, `inf` and `-inf` become strings, which `float` reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
