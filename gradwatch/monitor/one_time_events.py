"""What a monitor notes of a run, each kind once: losses of NaN, the batch behind one, validations that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwatch.events import BATCH_FINITE, BATCH_NONFINITE, LOSS_NAN, LOSS_WITHHELD, THINNED, VALIDATIONS_DIFFER
from gradwatch.records import Event

SAME_LOSS = 1e-3  # of itself: an evaluation in half precision or in another order of summation differs by less


@final
class OneTimeEvents:
    """Emits the first event of each kind.

    Args:
        emit: Called with each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._emitted: set[str] = set()
        self._validated: tuple[float, int] | None = None
        self._factor = 1

    @property
    def has_batch(self) -> bool:
        """Whether it has been noted if the inputs behind a loss that is not finite were."""
        return "batch" in self._emitted

    def nan(self, *, step: int, is_given: bool) -> None:
        """Note a loss of NaN that the loop handed over, or that it handed over none."""
        kind = LOSS_NAN if is_given else LOSS_WITHHELD
        if self._is_new(kind.name):
            self._emit(kind.emit(step=step))

    def batch(self, *, step: int, is_clean: bool) -> None:
        """Note of the first batch whose loss is not finite whether its inputs are."""
        if self._is_new("batch"):
            self._emit((BATCH_FINITE if is_clean else BATCH_NONFINITE).emit(step=step))

    def validation(self, value: float, *, step: int, updates: int) -> None:
        """Note the first validation loss that differs from the one before, of the same weights.

        Args:
            value: The validation loss.
            step: Current optimizer step.
            updates: How often an optimizer has stepped.
        """
        before, updates_before = self._validated or (value, updates)
        self._validated = value, updates
        if updates != updates_before or not abs(value - before) > SAME_LOSS * abs(before):
            return
        if self._is_new(VALIDATIONS_DIFFER.name):
            values = {"difference": value - before}
            self._emit(VALIDATIONS_DIFFER.emit(step=step, values=values, before=before, after=value))

    def thinned(self, factor: int, *, step: int, budget: float) -> None:
        """Emit that sampling became less often than ever before in this run."""
        if factor > self._factor:
            self._factor = factor
            self._emit(THINNED.emit(step=step, values={"factor": factor, "budget": budget}))

    def _is_new(self, kind: str) -> bool:
        is_new = kind not in self._emitted
        self._emitted.add(kind)
        return is_new
