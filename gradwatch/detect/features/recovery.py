"""Find where a lasting state begins and ends: the onset of a finding, and the step at which a layer has recovered."""

# T = steps of a window

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import baseline_loss, first_steps
from gradwatch.history.store import History
from gradwatch.records import Finding

LOSS_STEPS = 48
"""Newest steps that show where the loss is."""


def start_of_state(holds_T: NDArray[np.bool_], steps_T: NDArray[np.int64], *, least: int = 1) -> int | None:
    """Return the first step of a state that holds up to the newest step, or None if it holds for too few rows.

    Args:
        holds_T: Whether the state holds at each row.
        steps_T: Steps of the rows, increasing.
        least: Minimum number of rows up to the newest one at which the state must hold.
    """
    breaks = np.flatnonzero(~holds_T)
    first = int(breaks[-1]) + 1 if len(breaks) else 0
    return int(steps_T[first]) if len(holds_T) - first >= max(least, 1) else None


def tensors_of(history: History, finding: Finding) -> list[int]:
    """Return the indexes of the tensors that a finding names: trainable ones, if there are any.

    A finding for the whole run names all tensors.
    """
    names, layers = finding.names, history.info.layers
    inside = tuple(f"{name}." for name in names)
    named = [i for i, la in enumerate(layers) if not names or la.name in names or la.name.startswith(inside)]
    return [i for i in named if layers[i].trainable] or named


def fall_of_loss(history: History, *, fall: float) -> int | None:
    """Return the step from which the loss has been clearly lower than at the start, or None if it is not.

    Three quarters of the newest losses must be below three quarters of the first ones, and below the baseline by the
    fraction `fall`. Noise alone does not separate two samples of 48 and 16 losses by that much.
    """
    loss_T = history.scalar("loss", LOSS_STEPS)
    if len(loss_T) < LOSS_STEPS or not np.isfinite(loss_T).all():
        return None
    bound = min(float(np.quantile(first_steps(history, "loss"), 0.25)), (1 - fall) * baseline_loss(history)[0])
    if not float(np.quantile(loss_T, 0.75)) < bound:
        return None
    return int(history.run.steps(LOSS_STEPS)[np.argmax(loss_T < bound)])
