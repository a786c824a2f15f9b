"""Store statistics by step and layer: the newest steps in one array, older steps in thinned segments."""

# T = recorded steps, L = layers of the table, S = statistics

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradwatch.history.thinning import is_among

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]

WINDOW = 256
"""Number of newest steps that are always in memory unthinned: the longest window that a detector may read."""
MAX_APPENDED_STEPS = 1024
"""Maximum number of steps per call of `Table.append`."""
MAX_SLACK_BYTES = 1 << 19
"""Memory after the window for further steps. When it is full, the window moves back to the start of the array. Wide
rows get fewer steps of slack, since moving them is cheap compared with their training steps."""
MIN_SLACK_STEPS = 32
"""Minimum number of steps of slack after the window, for rows of any width."""


@final
class Table:
    """Statistics of some layers over the recorded steps. The returned arrays are views: never write to them.

    Args:
        layers: Names of the layers, such as parameter names; one empty name for the whole run.
        statistics: Names of the statistics, as in the catalogue.
        dtype: Floating dtype of the values.
        segment_length: Number of steps in a segment, which is thinned and stored on disk as a unit.
        keep: Returns a mask of the steps to keep, given all recorded steps; see `thinning`.

    Attributes:
        columns: Index of each statistic in the values of a step.
        last_step: The newest recorded step, or -1 before the first.
        slack: Steps that fit after the window.
    """

    def __init__(
        self,
        layers: Sequence[str],
        statistics: Sequence[str],
        *,
        dtype: DTypeLike,
        segment_length: int,
        keep: Callable[[Steps], NDArray[np.bool_]],
    ) -> None:
        self.layers = tuple(layers)
        self.statistics = tuple(statistics)
        self.dtype = np.dtype(dtype)
        self.shape = (len(self.statistics), len(self.layers))
        self.segment_length = segment_length
        self.last_step = -1
        self._keep = keep
        self.columns = {name: i for i, name in enumerate(self.statistics)}
        row_bytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        self.slack = min(max(MAX_SLACK_BYTES // max(row_bytes, 1), MIN_SLACK_STEPS), MAX_APPENDED_STEPS)
        capacity = WINDOW + self.slack
        self._steps_T = np.empty(capacity, np.int64)
        self._values_TSL: Floats = np.empty((capacity, *self.shape), self.dtype)
        self._len = 0
        self._old: dict[int, tuple[Steps, Floats]] = {}
        self._thinned_at = 0

    def __len__(self) -> int:
        """Return the number of kept steps."""
        return len(self.kept_steps())

    def append(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Append at most `MAX_APPENDED_STEPS` steps, increasing and later than all earlier ones.

        Raises:
            ValueError: A step does not follow the one before it, or the values do not have the shape (T, S, L).
        """
        self._check(steps_T, values_TSL)
        end = self._len + len(steps_T)
        if end > len(self._steps_T):
            self._make_room(len(steps_T))  # it may move the window, and so the end
            end = self._len + len(steps_T)
        self._steps_T[self._len : end], self._values_TSL[self._len : end] = steps_T, values_TSL
        self._len = end
        self.last_step = int(steps_T[-1])

    def _check(self, steps_T: Steps, values_TSL: Floats) -> None:
        assert len(steps_T) <= MAX_APPENDED_STEPS, f"a table appends at most {MAX_APPENDED_STEPS} steps at once"
        first = int(steps_T[0])
        if first <= self.last_step:
            raise ValueError(f"step {first} does not follow step {self.last_step}: recorded steps must grow")
        if (falls_T := steps_T[1:] <= steps_T[:-1]).any():
            before, step = steps_T[falls_T.argmax() :][:2].tolist()
            raise ValueError(f"step {step} does not follow step {before}: recorded steps must grow")
        if values_TSL.shape[1:] != self.shape:  # NumPy would broadcast some other shapes
            raise ValueError(f"step {first} has values of shape {values_TSL.shape[1:]}, expected {self.shape}")

    def fill(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Fill an empty table with any number of steps, such as the steps of a run on disk."""
        assert self._len == 0, "the table must be empty"
        recent = min(len(steps_T), WINDOW)
        split = len(steps_T) - recent
        # only the window is copied: older steps stay views of the argument, as they never change
        self._archive(steps_T[:split], values_TSL[:split])
        self._steps_T[:recent], self._values_TSL[:recent] = steps_T[split:], values_TSL[split:]
        self._len = recent
        self.last_step = int(steps_T[-1]) if len(steps_T) else -1

    def truncate(self, step: int) -> None:
        """Delete the steps after `step`."""
        steps_T, values_TSL = self.rows(thin=False)
        is_kept_T = steps_T <= step
        self._clear()
        self.fill(steps_T[is_kept_T], values_TSL[is_kept_T])

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the newest window of steps and their values."""
        newest = slice(max(0, self._len - WINDOW), self._len)
        return {"steps": self._steps_T[newest].copy(), "values": self._values_TSL[newest].copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the first step of `state` and all later steps by the steps of `state`."""
        if not len(state["steps"]):
            return  # a checkpoint before the first step
        steps_T, values_TSL = self.rows(thin=False)
        is_older_T = steps_T < state["steps"][0]
        self._clear()
        self.fill(
            np.concatenate([steps_T[is_older_T], state["steps"]]),
            np.concatenate([values_TSL[is_older_T], state["values"]]),
        )

    def steps(self, length: int = WINDOW) -> Steps:
        """Return at most `length` of the newest recorded steps, oldest first."""
        assert length <= WINDOW, f"a window has at most {WINDOW} steps"
        return self._steps_T[max(0, self._len - length) : self._len]

    def window(self, statistic: str, length: int = WINDOW) -> Floats:
        """Return a statistic over the newest steps, oldest first, of shape (T, L) with T at most `length`."""
        assert length <= WINDOW, f"a window has at most {WINDOW} steps"
        return self._values_TSL[max(0, self._len - length) : self._len, self.columns[statistic]]

    def newest(self, statistic: str) -> Floats:
        """Return a statistic at the newest step, of shape (L,)."""
        newest_L: Floats = self._values_TSL[self._len - 1, self.columns[statistic]]
        return newest_L

    def since(self, step: int) -> tuple[Steps, Floats]:
        """Return the steps (T,) and values (T, S, L) after a step.

        The step must not be older than the window before the last `append`.
        """
        first = int(np.searchsorted(self._steps_T[: self._len], step, side="right"))
        return self._steps_T[first : self._len], self._values_TSL[first : self._len]

    def series(self, statistic: str) -> tuple[Steps, Floats]:
        """Return the kept steps (T,) and a statistic at them (T, L), oldest first."""
        i = self.columns[statistic]
        steps_T = self._all_steps()
        values_TL = np.concatenate([*(v[:, i] for _, v in self._old.values()), self._values_TSL[: self._len, i]])
        keep_T = _select(self._keep, steps_T)
        return steps_T[keep_T], values_TL[keep_T]

    def rows(self, *, thin: bool = True) -> tuple[Steps, Floats]:
        """Return the kept steps (T,) and all values (T, S, L) at them, oldest first.

        Args:
            thin: Whether to drop steps that are in memory but no longer kept.
        """
        steps_T = self._all_steps()
        values_TSL = np.concatenate([*(v for _, v in self._old.values()), self._values_TSL[: self._len]])
        if not thin:
            return steps_T, values_TSL
        keep_T = _select(self._keep, steps_T)
        return steps_T[keep_T], values_TSL[keep_T]

    def kept_steps(self) -> Steps:
        """Return the kept steps, of shape (T,)."""
        steps_T = self._all_steps()
        return steps_T[_select(self._keep, steps_T)]

    def segment(self, index: int) -> tuple[Steps, Floats]:
        """Return the steps (T,) and values (T, S, L) of a segment in memory, including steps that are not kept."""
        first, last = index * self.segment_length, (index + 1) * self.segment_length
        recent = slice(*np.searchsorted(self._steps_T[: self._len], [first, last]).tolist())
        steps_T, values_TSL = self._steps_T[recent], self._values_TSL[recent]
        if index not in self._old:
            return steps_T, values_TSL
        # a segment may lie partly before and partly in the window
        old_steps_T, old_values_TSL = self._old[index]
        return np.concatenate([old_steps_T, steps_T]), np.concatenate([old_values_TSL, values_TSL])

    def _all_steps(self) -> Steps:
        return np.concatenate([*(s for s, _ in self._old.values()), self._steps_T[: self._len]])

    def _make_room(self, count: int) -> None:
        if self._len > WINDOW:
            self._slide()
        more = self._len + count - len(self._steps_T)
        if more > 0:  # more steps at once than the slack, which is small for wide rows
            self._steps_T = np.concatenate([self._steps_T, np.empty(more, np.int64)])
            self._values_TSL = np.concatenate([self._values_TSL, np.empty((more, *self.shape), self.dtype)])

    def _slide(self) -> None:
        """Move the window to the start of the array, and all older steps to the segments."""
        shift = self._len - WINDOW
        # copied: the window is about to overwrite them
        self._archive(self._steps_T[:shift].copy(), self._values_TSL[:shift].copy())
        for first in range(0, WINDOW, shift):  # source and target of a piece never overlap: NumPy needs no copy
            piece = slice(first, min(first + shift, WINDOW))
            source = slice(piece.start + shift, piece.stop + shift)
            self._steps_T[piece], self._values_TSL[piece] = self._steps_T[source], self._values_TSL[source]
        self._len = WINDOW
        # once per segment: the rule for older steps changes only when a new segment begins
        if self.last_step // self.segment_length != self._thinned_at:
            self._thin()

    def _archive(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Add steps to their segments."""
        if not len(steps_T):
            return
        segments, starts = np.unique(steps_T // self.segment_length, return_index=True)
        for index, start, end in zip(segments.tolist(), starts, [*starts[1:], len(steps_T)], strict=True):
            part = (steps_T[start:end], values_TSL[start:end])
            if index in self._old:
                steps, values = self._old[index]
                part = (np.concatenate([steps, part[0]]), np.concatenate([values, part[1]]))
            self._old[index] = part

    def _thin(self) -> None:
        """Drop the steps of old segments that are no longer kept. A segment that loses no step is not copied."""
        steps_T = self._all_steps()
        dropped_T = steps_T[~_select(self._keep, steps_T)]
        for index in set((dropped_T // self.segment_length).tolist()):
            if index in self._old:  # else the dropped steps are still in the array
                steps, values = self._old[index]
                is_kept = ~is_among(steps, dropped_T)
                self._old[index] = (steps[is_kept], values[is_kept])
                if not is_kept.any():
                    del self._old[index]
        self._thinned_at = self.last_step // self.segment_length

    def _clear(self) -> None:
        self._old.clear()
        self._len = 0
        self.last_step = -1
        self._thinned_at = 0


def _select(keep: Callable[[Steps], NDArray[np.bool_]], steps_T: Steps) -> NDArray[np.bool_]:
    # `keep` reads the newest step, so it needs at least one step
    return keep(steps_T) if len(steps_T) else np.zeros(0, np.bool_)
