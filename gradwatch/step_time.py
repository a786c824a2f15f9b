"""How long steps take, so that what is shared out of a training's time is not shared out of its pauses."""

from __future__ import annotations

from typing import final

INTERRUPTED = 2.0
"""Times as long as usual from which on a step was interrupted: by a validation, a checkpoint, a user who thinks."""
RISE, FALL = 1.03, 1.1
"""Factors by which the usual time follows longer and shorter steps: they balance where a quarter of all is shorter."""


@final
class Pace:
    """Follows the time that steps take; it starts with that of the first."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def counted(self, *seconds: float) -> float:
        """Return how much of the time of steps counts as training: of each at most `INTERRUPTED` times the usual.

        Args:
            seconds: Wall times from one step to the next; nan, where it is not known, counts as nothing.
        """
        usual_s, counted_s = self._usual_s, 0.0
        for step_s in seconds:
            if step_s > 0:
                usual_s = usual_s or step_s
                most_s = INTERRUPTED * usual_s
                counted_s += step_s if step_s < most_s else most_s
                usual_s = usual_s * RISE if step_s > usual_s else usual_s / FALL
        self._usual_s = usual_s
        return counted_s
