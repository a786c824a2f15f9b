"""Measure how long training steps take, without the pauses between them."""

from __future__ import annotations

from typing import final

PAUSE_FACTOR = 2.0
"""Multiple of the usual step time above which a step has a pause: a validation, a checkpoint, a user at a prompt."""
RISE, FALL = 1.03, 1.1
"""Factors by which the usual time follows longer and shorter steps. They balance if 1/4 of all steps are shorter."""


@final
class StepTimer:
    """Tracks the usual step time, starting with the time of the first step."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def training_s(self, *seconds: float) -> float:
        """Return the part of the step times that counts as training: at most `PAUSE_FACTOR` usual times per step.

        Args:
            seconds: Wall times from one step to the next; nan, an unknown time, counts as 0.
        """
        usual_s, training_s = self._usual_s, 0.0
        for step_s in seconds:
            if step_s > 0:  # false for nan
                usual_s = usual_s or step_s
                most_s = PAUSE_FACTOR * usual_s
                training_s += step_s if step_s < most_s else most_s
                # by steps of a factor, so that one long pause barely moves it
                usual_s = usual_s * RISE if step_s > usual_s else usual_s / FALL
        self._usual_s = usual_s
        return training_s
