"""Emit events at most once per run: a loss of NaN, and the batch that caused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwatch.events import BATCH_FINITE, BATCH_NONFINITE, LOSS_NAN, LOSS_WITHHELD, THINNED
from gradwatch.records import Event


@final
class OneTimeEvents:
    """Emits the first event of each kind.

    Args:
        emit: Called with each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._emitted: set[str] = set()
        self._factor = 1  # the largest so far

    @property
    def has_batch(self) -> bool:
        """Return whether the batch of the first non-finite loss has been inspected."""
        return "batch" in self._emitted

    def nan(self, *, step: int, is_given: bool) -> None:
        """Emit that the loop passed a loss of NaN, or no loss."""
        kind = LOSS_NAN if is_given else LOSS_WITHHELD
        if self._is_new(kind.name):
            self._emit(kind.emit(step=step))

    def batch(self, *, step: int, is_clean: bool) -> None:
        """Emit whether the inputs of the first non-finite loss are finite."""
        if self._is_new("batch"):  # one key for both kinds: only the first batch counts
            self._emit((BATCH_FINITE if is_clean else BATCH_NONFINITE).emit(step=step))

    def thinned(self, factor: int, *, step: int, budget: float) -> None:
        """Emit that sampling became rarer than at any earlier step of this run."""
        if factor > self._factor:  # a factor that falls and rises again is not emitted twice
            self._factor = factor
            self._emit(THINNED.emit(step=step, values={"factor": factor, "budget": budget}))

    def _is_new(self, kind: str) -> bool:
        is_new = kind not in self._emitted
        self._emitted.add(kind)
        return is_new
