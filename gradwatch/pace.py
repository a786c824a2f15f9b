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

    def counted(self, seconds: float) -> float:
        """Return how much of a step's time counts as training: at most `INTERRUPTED` times the usual.

        Args:
            seconds: Wall time from one step to the next; nan, where it is not known, counts as nothing.
        """
        if not seconds > 0:
            return 0.0
        usual_s = self._usual_s or seconds
        self._usual_s = usual_s * RISE if seconds > usual_s else usual_s / FALL
        return min(seconds, INTERRUPTED * usual_s)
