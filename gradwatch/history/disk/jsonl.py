"""A file of one noun per line in JSON, each with the step at which it was written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from gradwatch.history.disk import atomic
from gradwatch.records import Event, Finding

Noun = TypeVar("Noun", Finding, Event)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines(Generic[Noun]):
    """How one kind of noun is kept in a run directory.

    Args:
        name: File, in the run directory.
        noun: What it holds, in a word, for the message about a damaged line.
        encode: Gives the plain data of one, in which no number is infinite or nan: JSON has none.
        decode: Gives the noun back. It raises ValueError, TypeError, KeyError or AttributeError where it is damaged.
    """

    name: str
    noun: str
    encode: Callable[[Noun], dict[str, Any]]
    decode: Callable[[dict[str, Any]], Noun]

    def line(self, item: Noun, *, at: int) -> bytes:
        """Return one as a line of JSON.

        Args:
            item: What is to be kept.
            at: Newest step of the history when it was made, which need not be the step that it carries.
        """
        data = {"at": at} | self.encode(item) | {"step": int(item.step)}
        return json.dumps(data, allow_nan=False).encode() + b"\n"

    def read(self, directory: Path, *, until: int | None = None) -> tuple[list[Noun], list[str]]:
        """Read all in the order of their making. One that a kill has cut off is left out, without a word.

        Args:
            directory: A run directory. One of an older gradwatch may lack the file.
            until: Leave out those of later steps, and those written after this step.

        Returns:
            What was read, and what is damaged, a sentence each.
        """
        kept, problems = self._parse(directory / self.name, until)
        return [item for _, item in kept], problems

    def truncate(self, directory: Path, *, until: int) -> None:
        """Delete what is of later steps than one, what was written after it, and lines that are none."""
        path = directory / self.name
        kept, _ = self._parse(path, until)
        if path.exists():
            atomic.replace(path, b"".join(self.line(item, at=at) for at, item in kept))

    def _parse(self, path: Path, until: int | None) -> tuple[list[tuple[int, Noun]], list[str]]:
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


def number(value: float) -> float | str:
    """Return a number as JSON can hold it: `nan`, `inf` and `-inf` as words, which `float` reads back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
