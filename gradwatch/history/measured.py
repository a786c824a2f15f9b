"""Distinguish a measured NaN from a value that was not measured: a table stores both as nan."""

# T = recorded steps, L = layers of a table

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.events import LOSS_WITHHELD
from gradwatch.history.store import VALIDATION, History, Table

NORMS = ("grad_norm.before_clip", "grad_norm.after_clip")
"""Statistics of the run that every recorded step measures, and that may be NaN."""


def measured(history: History, table: Table, statistic: str) -> NDArray[np.bool_]:
    """Return which values of a statistic were measured, as booleans of shape (T, L); the others are nan.

    Args:
        history: The history.
        table: One of its tables, which has the statistic.
        statistic: Name in the catalogue.
    """
    known_TL: NDArray[np.bool_] = ~np.isnan(table.series(statistic)[1])
    if table is history.param and statistic in catalogue.SAMPLED_NAMES:
        # the tensors of an optimizer group are sampled at the same steps, and are rarely all NaN
        groups_L = np.array([-1 if layer.group is None else layer.group for layer in history.info.layers])
        for group in np.unique(groups_L):
            known_TL[:, groups_L == group] = known_TL[:, groups_L == group].any(axis=1, keepdims=True)
        return known_TL
    if statistic == VALIDATION[0]:  # measured with the accuracy, which is missing if there are no labels
        return known_TL | ~np.isnan(table.series(VALIDATION[1])[1])
    # every step measures the gradients; the activations have rows only for the steps that measured them
    if table is not history.run or statistic in NORMS or (statistic == "loss" and not _withholds_losses(history)):
        return np.ones_like(known_TL)
    return known_TL  # such as the hash of a batch that the loop does not pass: it is never NaN


def _withholds_losses(history: History) -> bool:
    return any(event.kind == LOSS_WITHHELD.name for event in history.events)
