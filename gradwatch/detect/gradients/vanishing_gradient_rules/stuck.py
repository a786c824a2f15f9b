"""Decide whether a mild fall over depth does harm: it heals by itself unless the loss stays at its start."""

from __future__ import annotations

from gradwatch.detect.features.baseline import first_loss, newest_loss
from gradwatch.history.store import History

MEDIAN_STEPS = 10
"""Steps in the median: more than the noise of single batches needs, few enough for an early finding."""


def is_stuck(history: History, *, healing_steps: int, stuck_frac: float) -> bool:
    """Return whether the loss is still at its start after the steps in which a mild fall heals by itself.

    Args:
        history: History of the run.
        healing_steps: Number of these steps.
        stuck_frac: Fraction of the first loss above which the loss is still at its start.
    """
    return history.step >= healing_steps and newest_loss(history, MEDIAN_STEPS) > stuck_frac * first_loss(history)
