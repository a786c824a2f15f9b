"""Remember which units of activation modules have been silent, and since when, at one bit per unit and mark."""

# A = activation modules, U = units of all of them, M = marks

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

AGREE = 0.9
"""Part of the units that are silent now, 0..1, that must have been silent since the step that is told."""


@final
class Silence:
    """Units that have fired at no sampled step since one of a few marks.

    A mark is a sampled step. Those kept lie ever farther apart, the farther they are back: one for each power of two of
    samples, and the first. So a run of 100,000 steps, sampled every 10, takes 15 bits for each unit.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._num_samples = 0
        self._marks: list[tuple[int, int]] = []  # which sample each was, and its step
        self._silent_MU = np.zeros((0, 0), np.uint8)  # eight units to a byte

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._silent_MU.nbytes

    def add(self, step: int, dead: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.float32]:
        """Take in a sampled step.

        Args:
            step: Optimizer step.
            dead: Of each module, which of its units fired for no sample; None where it was not called, or has none
                that can die. A module whose number of units changes makes all of them begin anew.

        Returns:
            Array of shape (3, A): how many units have fired at no sampled step since some step, which step that is, and
            how many units there are. It is the earliest that is true of nine tenths of those that are silent since the
            sample before this one; nan where no unit is.
        """
        sizes = tuple(len(units) if units is not None else size for units, size in self._padded(dead))
        if sizes != self._sizes:
            self._forget(sizes)
        # what was not looked at has not fired
        flags = [np.ones(size, np.bool_) if units is None else units for units, size in zip(dead, sizes, strict=True)]
        silent_U = np.packbits(np.concatenate(flags) if flags else np.zeros(0, np.bool_))
        self._silent_MU = np.concatenate([self._silent_MU & silent_U, silent_U[None]])
        self._marks.append((self._num_samples, step))
        self._num_samples += 1
        self._thin()
        return self._tell()

    def state(self) -> dict[str, Any]:
        """Return plain data and arrays that `restore` takes back."""
        marks_M2 = np.array(self._marks, np.int64).reshape(-1, 2)
        sizes_A = np.array(self._sizes, np.int64)
        return {"sizes": sizes_A, "samples": self._num_samples, "marks": marks_M2, "silent": self._silent_MU}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._sizes = tuple(int(size) for size in state["sizes"])
        self._num_samples = int(state["samples"])
        self._marks = [(int(sample), int(step)) for sample, step in state["marks"]]
        self._silent_MU = np.array(state["silent"], np.uint8)

    def _padded(self, dead: Sequence[NDArray[np.bool_] | None]) -> list[tuple[NDArray[np.bool_] | None, int]]:
        """Return what came of each module, with the number of units that it had last."""
        known = self._sizes if len(self._sizes) == len(dead) else (0,) * len(dead)
        return list(zip(dead, known, strict=True))

    def _forget(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._num_samples = 0
        self._marks = []
        self._silent_MU = np.zeros((0, -(-sum(sizes) // 8)), np.uint8)

    def _thin(self) -> None:
        """Keep the first mark, and one for each power of two of samples before the newest."""
        newest = self._num_samples - 1
        stride = [1 << max(newest - sample, 1).bit_length() - 1 for sample, _ in self._marks]
        kept = [i for i, (sample, _) in enumerate(self._marks) if sample % stride[i] == 0]
        if len(kept) < len(self._marks):
            self._marks = [self._marks[i] for i in kept]
            self._silent_MU = self._silent_MU[kept]

    def _tell(self) -> NDArray[np.float32]:
        row_3A = np.full((3, len(self._sizes)), np.nan, np.float32)
        row_3A[2] = [size or np.nan for size in self._sizes]
        sizes_A = np.array(self._sizes, np.int64)
        if not sizes_A.any():
            return row_3A
        silent_MU = np.unpackbits(self._silent_MU, axis=1, count=int(sizes_A.sum()))
        begin_A = (np.cumsum(sizes_A) - sizes_A)[sizes_A > 0]
        count_MA = np.add.reduceat(silent_MU, begin_A, axis=1, dtype=np.int64)
        now_A = count_MA[-2:].min(axis=0)
        earliest_A = np.argmax(count_MA >= AGREE * now_A, axis=0)  # the newest mark at the latest
        told_A = np.take_along_axis(count_MA, earliest_A[None], axis=0)[0]
        steps_M = np.array([step for _, step in self._marks])
        row_3A[0, sizes_A > 0] = np.where(now_A > 0, told_A, 0)
        row_3A[1, sizes_A > 0] = np.where(now_A > 0, steps_M[earliest_A], np.nan)
        return row_3A
