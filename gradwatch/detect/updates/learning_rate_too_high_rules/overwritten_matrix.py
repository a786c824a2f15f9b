"""Find an update that replaces one weight matrix while the others move as usual: its rate is far above theirs.

An update as large as its weights leaves nothing of what they were. If most matrices get such updates, the rate of the
run is too high, and the loss says whether that did harm. If one of them does, the loss may still fall, since the other
layers learn to work without it.

A weight in front of a normalization does not count: its size has no effect but on its own effective rate, which falls
with each large update (van Laarhoven 2017, https://arxiv.org/abs/1706.05350).
"""

# T = steps of a window, W = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, is_normalized, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_overwritten_matrix(
    history: History, *, ratio: float, every: int, lead: float, matrices: int
) -> Iterator[Sign]:
    """Yield a sign for each matrix that an update of the last `every` steps replaced.

    Args:
        history: History of the run.
        ratio: Update/weight ratio at which to report.
        every: Newest steps whose updates are judged.
        lead: Update/weight ratio in units of the median over matrices, at least.
        matrices: Minimum number of weight matrices.
    """
    structure = structure_of(history)
    indices_W = structure.matrices.indices_M
    # cheap: no tensor had such an update
    if (
        len(indices_W) < matrices
        or not np.fmax.reduce(history.param.window("update.ratio", every + 1), axis=None) >= ratio
    ):
        return
    # what begins near zero is replaced by its first update, as it should be
    first_W = first_measured(history, "weight.l2")[indices_W] / structure.matrices.signal_norm_M
    ratio_TW = history.param.window("update.ratio", every + 1)[:, indices_W]
    usual_T = median(ratio_TW.T)
    with np.errstate(invalid="ignore"):
        is_over_TW = (ratio_TW >= ratio) & (ratio_TW >= lead * usual_T[:, None]) & (first_W > NEAR_ZERO_GAIN)
    for place in np.flatnonzero(is_over_TW.any(axis=0)):
        at = int(np.argmax(is_over_TW[:, place]))
        tensor, largest = int(indices_W[place]), float(ratio_TW[at, place])
        group = history.info.layers[tensor].group
        # other code moved it, or its size has no effect
        if group is None or not np.isfinite(largest) or is_normalized(history.info.layers, tensor):
            continue
        rate = float(history.run.newest(f"lr.{group}")[0])
        yield Sign(
            f"one update at a learning rate of {rate:g} is {format_factor(largest)} times as large as the weight that "
            f"it moves, and {format_factor(largest / float(usual_T[at]))} times the update of the median layer",
            (
                Quantity(key="update.ratio", value=largest),
                Quantity(key="update.ratio.median", label="median update.ratio", value=float(usual_T[at])),
                Quantity(key=f"lr.{group}", value=rate),
            ),
            since=int(history.param.steps(every + 1)[at]),
            layer=module_of(history, tensor),
        )
