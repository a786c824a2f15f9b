"""Find a loss that is exactly 0 from the first step on: a margin that is met, a single class, or no labels."""

from __future__ import annotations

from gradwatch.detect.features.baseline import is_zero_from_start
from gradwatch.detect.features.finding import Sign
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_zero_loss(history: History) -> Sign | None:
    """Return a sign if every loss so far is exactly 0."""
    if not is_zero_from_start(history):
        return None
    steps = history.step + 1
    return Sign(
        f"the loss was exactly 0 at each of the first {steps} steps, so nothing is learned",
        (Quantity(key="loss.zero_steps", label="steps with a loss of 0", value=float(steps), unit="steps"),),
        severity=Severity.WARNING,
    )
