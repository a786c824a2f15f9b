"""Which recorded steps are kept: a pure function of step numbers, so that memory, disk and a resumed run agree.

Steps are grouped into segments of equal length. The newest segment and the `FULL_SEGMENTS` before it keep every
step; an older one keeps every 2nd, 4th, 8th ... step, the stride doubling each time its age doubles. Kept besides:
the first `HEAD` steps, those within `MARGIN` steps of one of the first `MOST_FINDINGS` findings, and of the steps on
which validation was measured the last one in each stride. What is dropped once never comes back, so thinning often
or seldom ends in the same rows, and their number grows with the logarithm of the run.
"""

# T = recorded steps, F = steps of findings, V = steps on which validation was measured

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FULL_SEGMENTS = 4
HEAD = 32
MARGIN = 32
MOST_FINDINGS = 64
MIN_SEGMENT, MAX_SEGMENT = 64, 1024
SEGMENT_BYTES = 4 << 20

Steps = NDArray[np.int64]


def segment_length(row_bytes: int) -> int:
    """Return how many steps a segment spans: the power of two, from 64 to 1024, that fills at most 4 MiB."""
    length = MAX_SEGMENT
    while length > MIN_SEGMENT and length * row_bytes > SEGMENT_BYTES:
        length //= 2
    return length


def stride(age: int) -> int:
    """Return every how many steps a segment keeps one, where the newest segment has age 0."""
    return 1 << (max(age - 1, 0) // FULL_SEGMENTS).bit_length()


def kept(
    steps_T: Steps, *, newest: int, length: int, findings: Sequence[int] = (), marked: Sequence[int] = ()
) -> NDArray[np.bool_]:
    """Say which steps are kept once `newest` has been recorded.

    Args:
        steps_T: Recorded steps, growing.
        newest: The newest recorded step.
        length: Steps of one segment.
        findings: Steps at which something was found, in the order of their finding.
        marked: Steps on which validation was measured, growing.

    Returns:
        Mask of shape (T,).
    """
    stride_T = _strides(steps_T, newest=newest, length=length)
    keep_T: NDArray[np.bool_] = (steps_T & (stride_T - 1) == 0) | (steps_T < HEAD)  # strides are powers of two
    if findings:
        keep_T |= _near(steps_T, findings)
    if marked:
        marked_V = np.asarray(marked, np.int64)
        last_V = _last_in_stride(marked_V, _strides(marked_V, newest=newest, length=length))
        keep_T |= among(steps_T, marked_V[last_V])
    return keep_T


def among(steps_T: Steps, others_K: Steps) -> NDArray[np.bool_]:
    """Say which steps are among others, both growing; `np.isin` sorts them again, and loads all of numpy.ma for it."""
    if not len(others_K):
        return np.zeros(len(steps_T), np.bool_)
    place_T = np.minimum(np.searchsorted(others_K, steps_T), len(others_K) - 1)
    among_T: NDArray[np.bool_] = others_K[place_T] == steps_T
    return among_T


def _strides(steps_T: Steps, *, newest: int, length: int) -> Steps:
    """Return the stride of each step's segment; `stride` for arrays."""
    quarter_T = np.maximum(newest // length - steps_T // length - 1, 0) // FULL_SEGMENTS
    bit_length_T = np.frexp(quarter_T)[1].astype(np.int64)  # the exponent of frexp is the bit length
    stride_T: Steps = np.left_shift(np.int64(1), bit_length_T)
    return stride_T


def _near(steps_T: Steps, findings: Sequence[int]) -> NDArray[np.bool_]:
    """Say which steps lie within the margin of one of the first findings."""
    steps_F = np.sort(np.array(list(dict.fromkeys(findings))[:MOST_FINDINGS], np.int64))
    after_T = np.searchsorted(steps_F, steps_T)
    to_next_T = steps_F[np.minimum(after_T, len(steps_F) - 1)] - steps_T
    to_previous_T = steps_T - steps_F[np.maximum(after_T - 1, 0)]
    near_T: NDArray[np.bool_] = np.minimum(np.abs(to_next_T), np.abs(to_previous_T)) <= MARGIN
    return near_T


def _last_in_stride(steps_V: Steps, stride_V: Steps) -> NDArray[np.bool_]:
    """Say which steps have no later one in the same aligned stretch of their stride."""
    last_V = np.ones(len(steps_V), np.bool_)
    last_V[:-1] = steps_V[1:] // stride_V[:-1] != steps_V[:-1] // stride_V[:-1]
    return last_V
