"""Judge whether a repeated batch is a part of the data, from what the probe has seen of the data around it."""

from __future__ import annotations

import math

from gradwatch.detect.features.events import events_of
from gradwatch.events import DERIVATIVE, PART_BATCH
from gradwatch.history.store import History

LBFGS = "LBFGS"
"""Optimizer with line searches that need the same batch at every step."""

ALL_DATA = ", which may be all the data"
"""End of the message on a batch that nothing shows to be a part of the data."""


def needs_one_batch(history: History, *, coordinates: int) -> bool:
    """Return whether the same batch is needed: by L-BFGS, or as the points at which an equation must hold.

    Args:
        history: History of the run.
        coordinates: Maximum numbers of a sample that may be a point: the loss has derivatives by them.
    """
    # runs of earlier versions did not record the width
    are_points = any(event.values.get("width", math.inf) <= coordinates for event in events_of(history, DERIVATIVE))
    return are_points or history.info.optimizer == LBFGS


def is_part(history: History) -> bool:
    """Return whether there are more data than the batch that came again, or nothing that it is made of."""
    return any(events_of(history, PART_BATCH))
