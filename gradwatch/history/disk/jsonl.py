"""Read and write files of one JSON object per line, each with the step at which it was written."""

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
        noun: Word for an item, for the message about a damaged line.
        encode: Returns an item as plain data without infinite or nan numbers, which JSON does not have.
        decode: Returns the item of such data. Raises ValueError, TypeError, KeyError or AttributeError if the data are
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
            at: Newest step of the history when the item was made, which may be later than the step of the item.
        """
        data = {"at": at} | self.encode(item) | {"step": int(item.step)}
        return json.dumps(data, allow_nan=False).encode() + b"\n"

    def read(self, directory: Path, *, until: int | None = None) -> tuple[list[Item], list[str]]:
        """Read all items, in the order in which they were made. An unfinished last line is ignored.

        Args:
            directory: A run directory. The directory of an older gradwatch may lack the file.
            until: Leave out items of later steps, and items written after this step.

        Returns:
            The items, and a sentence about each damaged line.
        """
        kept, problems = self._parse(directory / self.name, until)
        return [item for _, item in kept], problems

    def truncate(self, directory: Path, *, until: int) -> None:
        """Delete the items of steps after `until`, the items written after it, and damaged lines."""
        path = directory / self.name
        kept, _ = self._parse(path, until)
        if path.exists():
            atomic.replace(path, b"".join(self.line(item, at=at) for at, item in kept))

    def _parse(self, path: Path, until: int | None) -> tuple[list[tuple[int, Item]], list[str]]:
        if not path.exists():
            return [], []
        *texts, _unfinished = path.read_bytes().split(b"\n")
        kept, problems = [], []
        for number, text in enumerate(texts, start=1):
            try:
                data = json.loads(text)
                at = int(data.pop("at"))
                item = self.decode(data)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                problems.append(f"{path}, line {number} is no {self.noun}: {type(error).__name__}: {error}")
                continue
            if until is None or max(at, item.step) <= until:
                kept.append((at, item))
        return kept, problems


def encode_number(value: float) -> float | str:
    """Return a number for JSON: `nan`, `inf` and `-inf` become strings, which `float` reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
