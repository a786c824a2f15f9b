"""Histograms as TensorBoard draws them best: of the powers of ten of the sizes."""

# L = parameter tensors, B = bins, K = buckets

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

BUCKET = float(np.log10(2))
"""Least and greatest width of a bucket of a histogram, in powers of ten: TensorBoard draws 30 of them at most."""


def magnitudes(edges_B: Floats, counts_LB: Floats) -> list[NDArray[np.float64]]:
    """Return signed histograms as histograms of the power of ten of the size: left, right, count, of shape (K, 3).

    On the linear axis that TensorBoard draws, gradients themselves would be one bar at zero. Bins are put together to
    `BUCKET` at least; a wider one is drawn as wide as that. The bin that holds zero is left out, and so are empty ones
    at both ends.

    Args:
        edges_B: Edges of the bins, growing; one more than bins.
        counts_LB: Elements in each bin.

    Returns:
        One array per row of `counts_LB`, empty where nothing was counted.
    """
    left_B, right_B = edges_B[:-1], edges_B[1:]
    usable_B = (left_B * np.sign(right_B) > 0) & np.isfinite(left_B) & np.isfinite(right_B)
    small_B = np.log10(np.minimum(np.abs(left_B), np.abs(right_B))[usable_B].astype(np.float64))
    large_B = np.log10(np.maximum(np.abs(left_B), np.abs(right_B))[usable_B].astype(np.float64))
    if not len(small_B):
        return [np.zeros((0, 3))] * len(counts_LB)
    # rounding must not part bins that lie on the edge of a bucket
    bucket_B = np.floor((small_B - small_B.min()) / BUCKET + 1e-6).astype(np.int64)
    bucket_K, place_B = np.unique(bucket_B, return_inverse=True)
    small_K, large_K = np.full(len(bucket_K), np.inf), np.full(len(bucket_K), -np.inf)
    np.minimum.at(small_K, place_B, small_B)
    np.maximum.at(large_K, place_B, large_B)
    count_LK = np.zeros((len(counts_LB), len(bucket_K)))
    np.add.at(count_LK.T, place_B, counts_LB[:, usable_B].T)  # the same size with either sign
    sides_K2 = np.stack([small_K, np.minimum(large_K, small_K + BUCKET)], axis=1)
    return [_filled(np.column_stack([sides_K2, count_K])) for count_K in count_LK]


def _filled(buckets_K3: NDArray[np.float64]) -> NDArray[np.float64]:
    filled_K = np.flatnonzero(buckets_K3[:, 2])
    return buckets_K3[filled_K[0] : filled_K[-1] + 1] if len(filled_K) else buckets_K3[:0]
