"""Find updates that something undoes, so that the weights stay as they were."""

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

MAX_NUMEL = 256
"""Elements of a tensor whose norm an update of any direction changes visibly."""

MIN_VISIBLE_RATIO = 2e-6
"""Update/weight ratio, per root of the number of elements, that changes a norm by 30 roundings of float32."""

MIN_SMALL_TENSORS = 2
"""Small tensors that must agree: one could return to its norm by chance."""


def find_undone_updates(detector: HasCode, history: History, *, samples: int, kept: float) -> Iterator[Finding]:
    """Yield the run if all small tensors return to their norms, and the modules that return exactly.

    Args:
        detector: Whose findings these are.
        history: Of the run.
        samples: Number of successive updates that must be undone.
        kept: Change of a norm between two measurements, in units of an update, below which it was undone.
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
    structure = structure_of(history)
    is_small_L = structure.is_trainable_L & (structure.rms_scale_L <= MAX_NUMEL**0.5)
    ratio_TL, norm_TL = ratio_TL[:, is_small_L], norm_TL[:, is_small_L]
    moved_L = (ratio_TL > MIN_USUAL_RATIO).all(axis=0)
    if np.count_nonzero(moved_L) < MIN_SMALL_TENSORS:
        return
    change_TL = np.abs(np.diff(norm_TL[:, moved_L], axis=0)) / (ratio_TL * norm_TL)[:-1, moved_L]
    if not (change_TL < kept).all():
        return
    yield finding_of(
        detector,
        history,
        "something overwrites the weights after each update with their earlier values",
        Quantity(
            key="weight.l2.change_by_updates",
            label="largest change of a norm in ten steps / size of an update",
            value=float(change_TL.max()),
        ),
        Quantity(key="update.ratio.median", label="median update.ratio", value=float(np.nanmedian(ratio_TL[-1]))),
    )


def _put_back(detector: HasCode, history: History, ratio_TL: Floats, norm_TL: Floats) -> Iterator[Finding]:
    """Yield the modules whose norm is exactly the same before each update, though each update moves them."""
    if not (norm_TL[-1] == norm_TL[0]).any():
        return
    back_L = (norm_TL == norm_TL[0]).all(axis=0)
    back_L &= (ratio_TL > MIN_USUAL_RATIO).all(axis=0)
    back_L &= ratio_TL.min(axis=0) > MIN_VISIBLE_RATIO * structure_of(history).rms_scale_L
    if back_L.any():
        what = "returns to its earlier values after each update"
        ill_L = back_L & ~_is_normalised(history)
        yield from findings_of(detector, history, ill_L, severity=Severity.WARNING, what=what)


def _is_normalised(history: History) -> NDArray[np.bool_]:
    """Return which tensors, or their rows or columns, have a norm that is a round number, as weights on a sphere have.

    Their norm varies by rounding errors only, however far the weights move.
    """
    shapes = [(*info.shape, 1, 1) for info in history.info.layers]
    parts_3L = np.sqrt(
        [[1.0] * len(shapes), [float(shape[0]) for shape in shapes], [float(shape[1]) for shape in shapes]]
    )
    return np.asarray(is_round(history.param.newest("weight.l2").astype(np.float64) / parts_3L).any(axis=0))
