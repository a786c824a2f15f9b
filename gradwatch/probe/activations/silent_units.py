"""Record the step since which each unit of the activation modules has been silent, in one byte per unit."""

# A = activation modules, U = units of all modules, padded to a multiple of 8 for each module, M = marks

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.probe.activations.bitmask import UnitMask, num_bytes, packed

AGREEING_FRAC = 0.9
"""Minimum fraction of the silent units, 0..1, that have been silent since the reported step."""

FIRED = 255
"""Value instead of a mark, for units that fired at the newest sample."""


@final
class SilentUnits:
    """Units that have fired at no sampled step since one of a few marks.

    A mark is a sampled step. Older marks are farther apart: the first one stays, and one for each power of two of
    samples. So a run of 100,000 steps, sampled every 10, has 15 marks. For each unit, one byte is the mark at which its
    silence began.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._num_samples = 0
        self._marks: list[tuple[int, int]] = []  # number of the sample, and its step
        self._since_U = np.zeros(0, np.uint8)  # index of a mark

    def add(self, step: int, dead: Sequence[UnitMask | None]) -> NDArray[np.float32]:
        """Add a sampled step.

        Args:
            step: Optimizer step.
            dead: For each module, the units that fired for no sample; None if the module was not called, or no unit can
                die. If a module changes its number of units, all modules start again.

        Returns:
            Array of shape (3, A): the number of units that have been silent since some step, that step, and the number
            of units. The step is the earliest at which 90 % of the units were silent that were also silent at the last
            two samples; nan if no unit is silent.
        """
        # a module that was not called keeps its number of units
        known = self._sizes if len(self._sizes) == len(dead) else (0,) * len(dead)
        sizes = tuple([size if units is None else units.number for units, size in zip(dead, known, strict=True)])
        if sizes != self._sizes:
            self._reset(sizes)
        # units that were not read count as silent
        bits = [_all(size) if units is None else units.bits for units, size in zip(dead, sizes, strict=True)]
        silent_U = np.unpackbits(np.concatenate(bits) if bits else np.zeros(0, np.uint8), bitorder="little")
        # FIRED becomes the index of the mark that is appended below
        np.minimum(self._since_U, len(self._marks), out=self._since_U)
        self._since_U |= silent_U - np.uint8(1)  # 0 - 1 wraps to 255, which is FIRED, for units that fired
        self._marks.append((self._num_samples, step))
        self._num_samples += 1
        self._thin()
        return self._summary()

    def state(self) -> dict[str, Any]:
        """Return plain data and arrays that `restore` reads back."""
        marks_M2 = np.array(self._marks, np.int64).reshape(-1, 2)
        sizes_A = np.array(self._sizes, np.int64)
        return {"sizes": sizes_A, "samples": self._num_samples, "marks": marks_M2, "since": self._since_U.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._sizes = tuple(int(size) for size in state["sizes"])
        self._num_samples = int(state["samples"])
        self._marks = [(int(sample), int(step)) for sample, step in state["marks"]]
        self._since_U = np.array(state["since"], np.uint8)

    def _reset(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._num_samples = 0
        self._marks = []
        self._since_U = np.full(8 * sum(map(num_bytes, sizes)), FIRED, np.uint8)

    def _thin(self) -> None:
        """Keep the first mark, and one for each power of two of samples before the newest."""
        newest = self._num_samples - 1
        stride = [1 << max(newest - sample, 1).bit_length() - 1 for sample, _ in self._marks]
        kept = [i for i, (sample, _) in enumerate(self._marks) if sample % stride[i] == 0]
        if len(kept) < len(self._marks):
            # the next mark that is kept: a unit is then known to be silent for a shorter time, never for a longer one
            new_mark = np.full(FIRED + 1, FIRED, np.uint8)
            new_mark[: len(self._marks)] = np.searchsorted(kept, np.arange(len(self._marks)))
            self._since_U = new_mark[self._since_U]
            self._marks = [self._marks[i] for i in kept]

    def _summary(self) -> NDArray[np.float32]:
        sizes_A = np.array(self._sizes, np.float32)
        row_3A = np.stack([np.zeros_like(sizes_A), np.full_like(sizes_A, np.nan), sizes_A])
        row_3A[:, sizes_A == 0] = np.nan  # no unit of such a module can die, or it was never called
        silent = np.flatnonzero(self._since_U != FIRED)
        if not silent.size:
            return row_3A
        module_U = np.repeat(np.arange(len(sizes_A)), [8 * num_bytes(size) for size in self._sizes])
        num_marks = len(self._marks)
        cell = num_marks * module_U[silent] + self._since_U[silent]
        count_AM = np.bincount(cell, minlength=num_marks * len(sizes_A)).reshape(-1, num_marks).cumsum(axis=1)
        now_A = count_AM[:, -2:].min(axis=1)
        earliest_A = np.argmax(count_AM >= AGREEING_FRAC * now_A[:, None], axis=1)  # the newest mark at the latest
        (some,) = now_A.nonzero()
        row_3A[0, some] = count_AM[some, earliest_A[some]]
        row_3A[1, some] = np.array([step for _, step in self._marks])[earliest_A[some]]
        return row_3A


def _all(number: int) -> NDArray[np.uint8]:
    return packed(np.ones(number, np.bool_)).bits
