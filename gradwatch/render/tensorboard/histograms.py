"""Convert signed histograms to histograms of magnitudes on a log scale, which TensorBoard draws best."""

# L = parameter tensors, B = bins, K = buckets

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

BUCKET = float(np.log10(2))
"""Minimum and maximum width of a histogram bucket, in powers of ten. TensorBoard draws at most 30 buckets."""


def magnitudes(edges_B: Floats, counts_LB: Floats) -> list[NDArray[np.float64]]:
    """Return signed histograms as histograms of log10 of the magnitude.

    TensorBoard draws a linear axis, on which raw gradients would be a single bar at 0. Bins are merged into buckets of
    at least `BUCKET`, and a wider bin is drawn with width `BUCKET`. The bin around 0 is left out, and empty buckets at
    both ends are too.

    Args:
        edges_B: Edges of the bins, increasing; one more than bins.
        counts_LB: Number of elements in each bin.

    Returns:
        One array of shape (K, 3) per row of `counts_LB`, with left edge, right edge and count of each bucket. An array
        is empty if its row counted no elements.
    """
    left_B, right_B = edges_B[:-1], edges_B[1:]
    # both edges have the same sign, so the bin does not hold 0; the outermost edges may be Inf
    usable_B = (left_B * np.sign(right_B) > 0) & np.isfinite(left_B) & np.isfinite(right_B)
    small_B = np.log10(np.minimum(np.abs(left_B), np.abs(right_B))[usable_B].astype(np.float64))
    large_B = np.log10(np.maximum(np.abs(left_B), np.abs(right_B))[usable_B].astype(np.float64))
    if not len(small_B):
        return [np.zeros((0, 3))] * len(counts_LB)
    # 1e-6: rounding must not separate bins that lie on the edge of a bucket
    bucket_B = np.floor((small_B - small_B.min()) / BUCKET + 1e-6).astype(np.int64)
    bucket_K, place_B = np.unique(bucket_B, return_inverse=True)
    # negative bins run from large to small: sort all bins by bucket, since reduceat needs contiguous parts
    order_B = np.argsort(place_B, kind="stable")
    first_K = np.searchsorted(place_B[order_B], np.arange(len(bucket_K)))
    small_K = np.minimum.reduceat(small_B[order_B], first_K)
    large_K = np.maximum.reduceat(large_B[order_B], first_K)
    buckets_LK3 = np.empty((len(counts_LB), len(bucket_K), 3))
    buckets_LK3[:, :, 0], buckets_LK3[:, :, 1] = small_K, np.minimum(large_K, small_K + BUCKET)
    # negative and positive bins of equal magnitude add up
    buckets_LK3[:, :, 2] = np.add.reduceat(counts_LB[:, np.flatnonzero(usable_B)[order_B]], first_K, axis=1)
    is_filled_LK = buckets_LK3[:, :, 2] > 0
    begin_L = np.argmax(is_filled_LK, axis=1)
    # argmax of an all-false row is 0, so the end of an empty row is set to its begin
    end_L = np.where(is_filled_LK.any(axis=1), len(bucket_K) - np.argmax(is_filled_LK[:, ::-1], axis=1), begin_L)
    return [buckets_K3[begin:end] for buckets_K3, begin, end in zip(buckets_LK3, begin_L, end_L, strict=True)]
