"""Events that are emitted once per run: a loss of NaN, its batch, validations that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwatch.records import Event

SAME_LOSS_TOLERANCE = 1e-3  # relative: evaluations in half precision or in another summation order differ by less


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
        """Whether `batch` has been called."""
        return "batch" in self._emitted

    def nan(self, *, step: int, is_given: bool) -> None:
        """Emit that the loop passed a loss of NaN, or no loss."""
        kind, what = ("loss-nan", "a loss of NaN") if is_given else ("loss-withheld", "no loss")
        if self._is_new(kind):
            self._emit(Event(kind=kind, step=step, text=f"the loop handed over {what}"))

    def batch(self, *, step: int, is_clean: bool) -> None:
        """Emit whether the inputs are finite, for the first batch whose loss is not."""
        if self._is_new("batch"):
            kind, text = ("batch-finite", "no") if is_clean else ("batch-nonfinite", "a")
            self._emit(Event(kind=kind, step=step, text=f"{text} value of the inputs is NaN or Inf"))

    def validation(self, value: float, *, step: int, updates: int) -> None:
        """Emit the first validation loss that differs from the previous one, with the same weights.

        Args:
            value: The validation loss.
            step: Optimizer step in progress.
            updates: Number of updates so far.
        """
        before, updates_before = self._validated or (value, updates)
        self._validated = value, updates
        if updates != updates_before or not abs(value - before) > SAME_LOSS_TOLERANCE * abs(before):
            return
        if self._is_new("validations-differ"):
            text = f"validation gave {before:.6g} and {value:.6g} with the same weights"
            self._emit(Event(kind="validations-differ", step=step, text=text, values={"difference": value - before}))

    def thinned(self, factor: int, *, step: int, budget: float) -> None:
        """Emit that sampled statistics are measured less often than ever before in this run."""
        if factor > self._factor:
            self._factor = factor
            text = f"to keep to watch.budget, sampled statistics are measured {factor} times more seldom"
            values = {"factor": float(factor), "budget": budget}
            self._emit(Event(kind="thinned", step=step, text=text, values=values))

    def _is_new(self, kind: str) -> bool:
        is_new = kind not in self._emitted
        self._emitted.add(kind)
        return is_new
