"""Find weight matrices at the bottom of a cliff over depth: almost no gradient, next to layers with a gradient.

Vanishing gradients are as small, but have a slope and no cliff.
"""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.history.store import History


def find_cliffs(history: History, l2_TL: Floats, *, decades: float, matrices: int) -> NDArray[np.bool_]:
    """Return which tensors are matrices far below the median matrix with a cliff on one side, of shape (L,).

    Args:
        history: History of the run.
        l2_TL: Gradient norms of the newest steps.
        decades: Minimum distance below the median matrix, in powers of ten.
        matrices: Minimum number of weight matrices.
    """
    affected_L = np.zeros(l2_TL.shape[1], np.bool_)
    newest_M = log10(matrix_rms(history, l2_TL[-1]))
    # cheap: the newest step alone rules out most runs
    if len(newest_M) < matrices or not np.fmax.reduce(newest_M) - np.fmin.reduce(newest_M) > decades:
        return affected_L
    level_M = log10(matrix_rms(history, median(l2_TL)))
    top_M = log10(matrix_rms(history, np.fmax.reduce(l2_TL)))
    tiny_M = top_M < median(level_M) - decades  # False for nan, which stands for zero and missing
    for start, end in runs_of(tiny_M):
        sides_M = level_M[[i for i in (start - 1, end) if 0 <= i < len(level_M)]]
        edges_M = top_M[[i for i in (start, end - 1) if 0 <= i < len(level_M)]]
        # a decade less than the full drop, because the neighbor may lie below the median
        tiny_M[start:end] = bool((sides_M > edges_M.max() + decades - 1).any())
    affected_L[structure_of(history).matrices.indices_M[tiny_M]] = True
    return affected_L


def gap_below_median(history: History, l2_TL: Floats, group: list[int]) -> float:
    """Return the gap in decades between a group's gradient elements and the median matrix, or inf for zero."""
    level = median(log10(matrix_rms(history, median(l2_TL))))
    top_L = log10(np.fmax.reduce(l2_TL)[group] / structure_of(history).rms_scale_L[group])
    return float(level - np.fmax.reduce(top_L)) if np.isfinite(top_L).any() else np.inf


def runs_of(mask_M: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the start and the exclusive end of each unbroken run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask_M, [False]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
