"""Select the recorded steps to keep, from step numbers only, so that memory, disk and a resumed run agree.

Steps are grouped into segments of equal length. The newest segment and the `FULL_SEGMENTS` before it keep every step.
An older segment keeps every 2nd, 4th, 8th ... step. The stride doubles each time the age of the segment doubles.
Three further sets of steps are kept:

- the first `FIRST_STEPS`;
- the steps within `MARGIN_STEPS` of one of the first `MAX_FINDINGS` findings;
- in each stride, the last step with a validation.

A dropped step never returns. The kept rows therefore do not depend on how often the history is thinned. Their number
grows with the logarithm of the number of steps.
"""

# T = recorded steps, F = steps of findings, V = steps with a validation

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FULL_SEGMENTS = 4
FIRST_STEPS = 32
MARGIN_STEPS = 32
MAX_FINDINGS = 64
MIN_SEGMENT_STEPS, MAX_SEGMENT_STEPS = 64, 1024
MAX_SEGMENT_BYTES = 4 << 20

Steps = NDArray[np.int64]


def choose_segment_length(row_bytes: int) -> int:
    """Return the number of steps in a segment: the largest power of two from 64 to 1024 that fits in 4 MiB, or 64."""
    length = MAX_SEGMENT_STEPS
    while length > MIN_SEGMENT_STEPS and length * row_bytes > MAX_SEGMENT_BYTES:
        length //= 2
    return length


def is_kept(
    steps_T: Steps, *, newest: int, length: int, findings: Sequence[int] = (), validations: Sequence[int] = ()
) -> NDArray[np.bool_]:
    """Return a mask of the kept steps if `newest` is the newest recorded step.

    Args:
        steps_T: Recorded steps, increasing.
        newest: The newest recorded step.
        length: Steps in one segment.
        findings: Steps of the findings, in the order of their reports.
        validations: Steps with a validation, increasing.

    Returns:
        Mask of shape (T,).
    """
    stride_T = _strides(steps_T, newest=newest, length=length)
    keep_T: NDArray[np.bool_] = (steps_T & (stride_T - 1) == 0) | (steps_T < FIRST_STEPS)  # strides are powers of two
    if findings:
        keep_T |= _is_near(steps_T, findings)
    if validations:
        steps_V = np.asarray(validations, np.int64)
        is_last_V = _is_last_in_stride(steps_V, _strides(steps_V, newest=newest, length=length))
        keep_T |= is_among(steps_T, steps_V[is_last_V])
    return keep_T


def is_among(steps_T: Steps, others_K: Steps) -> NDArray[np.bool_]:
    """Return a mask of the steps that are among others. Both arrays must increase."""
    # both are sorted, so this is faster than `np.isin`, which sorts them again
    if not len(others_K):
        return np.zeros(len(steps_T), np.bool_)
    # clipped: a step after all others has no place among them
    place_T = np.minimum(np.searchsorted(others_K, steps_T), len(others_K) - 1)
    is_among_T: NDArray[np.bool_] = others_K[place_T] == steps_T
    return is_among_T


def _strides(steps_T: Steps, *, newest: int, length: int) -> Steps:
    """Return the stride of the segment of each step. The segment keeps every stride-th step."""
    quarter_T = np.maximum(newest // length - steps_T // length - 1, 0) // FULL_SEGMENTS
    bit_length_T = np.frexp(quarter_T)[1].astype(np.int64)  # the exponent of frexp is the bit length
    stride_T: Steps = np.left_shift(np.int64(1), bit_length_T)
    return stride_T


def _is_near(steps_T: Steps, findings: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask of the steps within `MARGIN_STEPS` of one of the first findings."""
    # distinct steps: many findings at one step count once
    steps_F = np.sort(np.array(list(dict.fromkeys(findings))[:MAX_FINDINGS], np.int64))
    after_T = np.searchsorted(steps_F, steps_T)
    to_next_T = steps_F[np.minimum(after_T, len(steps_F) - 1)] - steps_T
    to_previous_T = steps_T - steps_F[np.maximum(after_T - 1, 0)]
    is_near_T: NDArray[np.bool_] = np.minimum(np.abs(to_next_T), np.abs(to_previous_T)) <= MARGIN_STEPS
    return is_near_T


def _is_last_in_stride(steps_V: Steps, stride_V: Steps) -> NDArray[np.bool_]:
    """Return a mask of the steps that are the last ones in their stride."""
    is_last_V = np.ones(len(steps_V), np.bool_)
    is_last_V[:-1] = steps_V[1:] // stride_V[:-1] != steps_V[:-1] // stride_V[:-1]
    return is_last_V
