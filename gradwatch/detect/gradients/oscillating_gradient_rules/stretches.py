"""Find stretches: the loss jumps back to its start each time that other batches come.

Two kinds of batches alternate in stretches. Within a stretch the loss falls. At each change it jumps up in one step,
and the jumps are equally far apart.

Wrong for alternating tasks with separate layers, which `is_alternating` recognizes.
"""

# T = steps of a window, P = jumps

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.gradients.oscillating_gradient_rules.window import WINDOW_STEPS, is_alternating, max_first_loss
from gradwatch.history.store import History
from gradwatch.records import Quantity

JUMP_RATIO = 3.0
"""Height of a jump over the loss one step before."""

MIN_JUMPS = 4
"""Jumps at equal distances that do not occur by chance."""

MIN_STRETCH_STEPS = 3
"""Steps of the shortest stretch in which the loss visibly falls."""

MAX_STRETCH_STEPS = 24
"""Steps of the longest stretch: longer ones are separate tasks, as in continual learning."""


def find_stretches(history: History, *, return_to: float) -> Sign | None:
    """Return a sign if the loss jumps back to its start at equal distances.

    Args:
        history: History of the run.
        return_to: Loss that the jumps must reach, in units of the largest of the first steps.
    """
    first = max_first_loss(history)
    high = return_to * first
    length = jump_period(history.scalar("loss", 2 * WINDOW_STEPS), high=high, low=high / JUMP_RATIO)
    if length is None or is_alternating(history):
        return None
    loss = float(median(history.scalar("loss", WINDOW_STEPS)))
    return Sign(
        f"every {length} steps the loss jumps back to its start: the batches change, and the model forgets what "
        "it learned from the last ones",
        (
            Quantity(key="stretches.steps", label="steps from jump to jump", value=float(length), unit="steps"),
            Quantity(key="loss.first_max", label="largest loss of the first steps", value=first),
            Quantity(key="loss.median", label="median loss of 48 steps", value=loss),
        ),
    )


def jump_period(loss_T: Floats, *, high: float, low: float) -> int | None:
    """Return the number of steps between the jumps of a loss, or None if they are few or unevenly spaced.

    Args:
        loss_T: Losses of successive steps, of shape (T,).
        high: Loss that each jump reaches in one step.
        low: Loss below which the previous step must be.
    """
    jumps_P = np.flatnonzero((loss_T[1:] >= high) & (loss_T[:-1] < low)) + 1
    if len(jumps_P) < MIN_JUMPS:
        return None
    distances_P = np.diff(jumps_P)
    length = int(distances_P[0])
    is_even = bool((distances_P == length).all()) and MIN_STRETCH_STEPS <= length <= MAX_STRETCH_STEPS
    lasts = jumps_P[0] < 2 * length and len(loss_T) - jumps_P[-1] <= length  # the jumps span the window
    return length if is_even and lasts else None
