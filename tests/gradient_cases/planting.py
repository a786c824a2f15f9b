"""Say what a case is: a builder of a module with its loss or of a step, and the planted mistake with its line."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MARK = "# mistake"
"""Ends the mistaken line."""


@dataclass(frozen=True)
class PlantedCase:
    """A builder with what is planted in it.

    Args:
        name: Name of the builder.
        build_unseeded: Returns `(module, inputs, loss_fn)` or `(step, model, batch)`.
        kind: Kind of the mistake, or None for a right case.
        where: Names of which one has to be said: the Function, function, hook, module or parameter.
        file: File of the mistake.
        line: Its line, or 0.
    """

    name: str
    build_unseeded: Callable[[], tuple[Any, Any, Any]]
    kind: str | None
    where: tuple[str, ...]
    file: str
    line: int

    def build(self) -> tuple[Any, Any, Any]:
        """Return a fresh case, always with the same numbers."""
        torch.manual_seed(zlib.crc32(self.name.encode()) % 2**31)
        return self.build_unseeded()


CASES: list[PlantedCase] = []

Builder = Callable[[], tuple[Any, Any, Any]]


def planted(kind: str, *where: Any) -> Callable[[Builder], Builder]:
    """Register a case with a mistake in the first of some classes or functions, at its line that ends with the mark.

    Args:
        kind: Kind of the mistake.
        where: The class or function with the mistake, and further names that also count as the place.
    """
    lines, first = inspect.getsourcelines(where[0])
    line = next(i for i, text in enumerate(lines, first) if text.rstrip().endswith(MARK))
    names = tuple(w if isinstance(w, str) else w.__name__ for w in where)

    def register(builder: Builder) -> Builder:
        file = inspect.getsourcefile(where[0]) or ""
        CASES.append(PlantedCase(builder.__name__, builder, kind, names, file, line))
        return builder

    return register


def right(builder: Builder) -> Builder:
    """Register a case without a mistake."""
    CASES.append(PlantedCase(builder.__name__, builder, None, (), "", 0))
    return builder
