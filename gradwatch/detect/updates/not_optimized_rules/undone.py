"""Find updates that other code undoes, so that the weights keep their values."""

# T = steps that measured the updates, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.not_optimized_rules.measurements import (
    MIN_USUAL_RATIO,
    findings_of,
    is_round,
    measured_updates,
)
from gradwatch.history.store import Floats, History
from gradwatch.records import Finding, Quantity, Severity

CHANGE = "weight.l2.change_by_updates"

MAX_NUMEL = 256
"""Number of elements up to which any update visibly changes the norm of a tensor."""

MIN_VISIBLE_RATIO = 2e-6
"""Update/weight ratio, per root of the number of elements, that changes a norm by 30 roundings of float32."""

MIN_SMALL_TENSORS = 2
"""Small tensors that must agree: one tensor could return to its norm by chance."""


def find_undone_updates(detector: HasCode, history: History, *, samples: int, kept: float) -> Iterator[Finding]:
    """Yield the run if all small tensors return to their norms, and the modules that return exactly.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        samples: Number of successive updates that must be undone.
        kept: Change of a norm between two measurements, in units of an update, below which the update was undone.
    """
    ratio_TL, norm_TL = measured_updates(history, samples + 1)
    if len(ratio_TL) <= samples:
        return
    yield from _overwritten(detector, history, ratio_TL, norm_TL, kept=kept)
    yield from _put_back(detector, history, ratio_TL, norm_TL)


def _overwritten(
    detector: HasCode, history: History, ratio_TL: Floats, norm_TL: Floats, *, kept: float
) -> Iterator[Finding]:
    """Yield the run if the norms of all small tensors change by less than `kept` of an update."""
    change_TL = changes_by_updates(history, ratio_TL, norm_TL)
    if change_TL is None or not (change_TL < kept).all():
        return
    yield finding_of(
        detector,
        history,
        "something overwrites the weights after each update with their earlier values",
        Quantity(
            key=CHANGE,
            label="largest change of a norm in ten steps / size of an update",
            value=float(change_TL.max()),
        ),
        Quantity(key="update.ratio.median", label="median update.ratio", value=float(np.nanmedian(ratio_TL[-1]))),
    )


def changes_by_updates(history: History, ratio_TL: Floats, norm_TL: Floats) -> Floats | None:
    """Return the change of each small tensor's norm between measurements, in units of an update.

    Returns:
        Changes of shape (T - 1, small tensors that each update moves), or None if there are too few such tensors.
    """
    structure = structure_of(history)
    is_small_L = structure.is_trainable_L & (structure.rms_scale_L <= MAX_NUMEL**0.5)
    ratio_TL, norm_TL = ratio_TL[:, is_small_L], norm_TL[:, is_small_L]
    moved_L = (ratio_TL > MIN_USUAL_RATIO).all(axis=0)
    if np.count_nonzero(moved_L) < MIN_SMALL_TENSORS:
        return None
    change_TL: Floats = np.abs(np.diff(norm_TL[:, moved_L], axis=0)) / (ratio_TL * norm_TL)[:-1, moved_L]
    return change_TL


def _put_back(detector: HasCode, history: History, ratio_TL: Floats, norm_TL: Floats) -> Iterator[Finding]:
    """Yield the modules with exactly equal norms before each update, although each update moves them."""
    # cheap: compares two rows only
    if not (norm_TL[-1] == norm_TL[0]).any():
        return
    back_L = (norm_TL == norm_TL[0]).all(axis=0)
    back_L &= (ratio_TL > MIN_USUAL_RATIO).all(axis=0)
    back_L &= ratio_TL.min(axis=0) > MIN_VISIBLE_RATIO * structure_of(history).rms_scale_L
    if back_L.any():
        what = "returns to its earlier values after each update"
        # a projection to the sphere keeps the norm while the weights move
        ill_L = back_L & ~_is_normalised(history)
        yield from findings_of(detector, history, ill_L, severity=Severity.WARNING, what=what)


def _is_normalised(history: History) -> NDArray[np.bool_]:
    """Return which tensors, rows or columns have a round norm, like weights on a sphere.

    Their norm varies by rounding errors only, however far the weights move.
    """
    shapes = [(*info.shape, 1, 1) for info in history.info.layers]  # scalars and vectors get two dimensions
    parts_3L = np.sqrt(
        [[1.0] * len(shapes), [float(shape[0]) for shape in shapes], [float(shape[1]) for shape in shapes]]
    )
    return np.asarray(is_round(history.param.newest("weight.l2").astype(np.float64) / parts_3L).any(axis=0))
