"""Define the steps that the mechanisms read, and their shared parts: the first loss and alternating tasks."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.history.store import History

NORM = "grad_norm.before_clip"

WINDOW_STEPS = 48
"""Steps of the window: four waves of 12 steps, and few enough for an early finding."""

FIRST_LOSS_STEPS = 8
"""First steps of the run; their largest loss is the start of the loss."""


def max_first_loss(history: History) -> float:
    return float(np.fmax.reduce(first_steps(history, "loss", FIRST_LOSS_STEPS)))


def is_alternating(history: History, *, task_frac: float) -> bool:
    """Return whether a tensor has a gradient at some steps and not at others: tasks with separate losses.

    Args:
        history: History of the run.
        task_frac: Fraction of the steps that must be exceeded both with and without a gradient.
    """
    moved_frac_L = (history.param.window("grad.l2", WINDOW_STEPS) > 0).mean(axis=0)
    return bool(((moved_frac_L > task_frac) & (moved_frac_L < 1 - task_frac)).any())
