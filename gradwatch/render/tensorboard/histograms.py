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
    order_B = np.argsort(place_B, kind="stable")
    first_K = np.searchsorted(place_B[order_B], np.arange(len(bucket_K)))
    small_K = np.minimum.reduceat(small_B[order_B], first_K)
    large_K = np.maximum.reduceat(large_B[order_B], first_K)
    buckets_LK3 = np.empty((len(counts_LB), len(bucket_K), 3))
    buckets_LK3[:, :, 0], buckets_LK3[:, :, 1] = small_K, np.minimum(large_K, small_K + BUCKET)
    # the same size with either sign
    buckets_LK3[:, :, 2] = np.add.reduceat(counts_LB[:, np.flatnonzero(usable_B)[order_B]], first_K, axis=1)
    is_filled_LK = buckets_LK3[:, :, 2] > 0
    begin_L = np.argmax(is_filled_LK, axis=1)
    end_L = np.where(is_filled_LK.any(axis=1), len(bucket_K) - np.argmax(is_filled_LK[:, ::-1], axis=1), begin_L)
    return [buckets_K3[begin:end] for buckets_K3, begin, end in zip(buckets_LK3, begin_L, end_L, strict=True)]
