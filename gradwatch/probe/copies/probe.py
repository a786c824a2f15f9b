"""Look at the copies of the watched models at a few steps: targets, averages and teachers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch.optim import Optimizer

from gradwatch.events import Observation
from gradwatch.probe.copies.pairs import find_pairs
from gradwatch.probe.copies.stale_statistics import CopiedStatistics
from gradwatch.probe.copies.teachers import TeacherModes, find_teachers
from gradwatch.probe.copies.unchanged import WrittenCopy
from gradwatch.probe.copies.unheld import find_unheld, held_by
from gradwatch.probe.parameters import Models

SEARCH_STEP = 1
"""Step at which to search for copies: most are made before the loop, and some in its first step."""

EVERY_STEPS = 16
"""Minimum steps between two looks at the copies."""

EVERY_FRAC = 0.125
"""Minimum part of the run between two looks at the copies."""

NEVER = 2**62
"""A step that no training reaches."""


@final
class Copies:
    """Search for copies of the watched models, and follow each until nothing more can be said about it.

    A copy is a module with the names, shapes and nearly the values of the parameters of a trained one, whose own
    parameters no optimizer holds. A frozen teacher may have any other parameters.

    Args:
        models: A model, or several by name.
        optimizers: The optimizers that move them.
    """

    def __init__(self, models: Models, optimizers: Sequence[Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        self._next = SEARCH_STEP
        self._followed: list[tuple[WrittenCopy, CopiedStatistics]] | None = None  # None before the search
        self._teachers: list[TeacherModes] = []

    def find(self, step: int, /) -> Iterator[Observation]:
        """Yield what the copies show, after an optimizer step.

        Args:
            step: Finished optimizer step.
        """
        if step < self._next:
            return
        if self._followed is None:
            self._followed = []  # an error ends the search
            held = held_by(self._optimizers)
            unheld = find_unheld(self._models, held)
            pairs = find_pairs(self._models, held, unheld) if unheld else []
            self._followed = [(WrittenCopy(pair, step), CopiedStatistics(pair)) for pair in pairs]
            self._teachers = find_teachers(self._models, held, unheld) if unheld else []
        else:
            for teacher in self._teachers:
                yield from teacher.find()
            self._teachers = []
        for written, statistics in self._followed:
            yield from written.find(step)
            if written.has_moved:
                yield from statistics.find()
        self._next = step + max(EVERY_STEPS, int(EVERY_FRAC * step)) if self._followed or self._teachers else NEVER

    def close(self) -> None:
        """Remove all hooks."""
        for written, statistics in self._followed or ():
            written.close()
            statistics.close()
        for teacher in self._teachers:
            teacher.close()
        self._followed, self._teachers, self._next = [], [], NEVER
