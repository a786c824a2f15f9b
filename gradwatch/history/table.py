"""One table of the history: statistics by step and layer, the newest steps in one piece, older ones by segments."""

# T = recorded steps, L = layers (rows of the table), S = statistics

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradwatch.history.thinning import among

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]

WINDOW = 256
"""Newest recorded steps that are always in memory, at full detail: the longest window that a detector may ask for."""
MAX_APPENDED_STEPS = 1024
"""Steps per call of `Table.append` at most."""
SLACK_BYTES = 1 << 19
"""Memory behind the window for steps that come: each time that it is full, all of the window slides back. Wide rows
get little, since moving them takes nothing beside the steps that make them."""
LEAST_SLACK = 32
"""Steps for which there is room behind the window however wide they are."""


@final
class Table:
    """Statistics of some layers over the recorded steps. Its arrays are views: read them, do not write to them.

    Args:
        layers: Names of the rows, such as parameter names; one empty name for the run as a whole.
        statistics: Names of the statistics, as in the catalogue.
        dtype: Floating dtype of the values.
        segment_length: Steps that are thinned, and stored on disk, together.
        keep: Says which of all recorded steps are kept, given the steps; see `thinning`.
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
        """The newest recorded step, or -1 before the first."""
        self._keep = keep
        self.columns = {name: i for i, name in enumerate(self.statistics)}
        """Place of each statistic in the values of a step."""
        row_bytes = self.shape[0] * self.shape[1] * self.dtype.itemsize
        self.slack = min(max(SLACK_BYTES // max(row_bytes, 1), LEAST_SLACK), MAX_APPENDED_STEPS)
        """Steps for which there is room behind the window."""
        room = WINDOW + self.slack
        self._steps_T = np.empty(room, np.int64)
        self._values_TSL: Floats = np.empty((room, *self.shape), self.dtype)
        self._len = 0
        self._old: dict[int, tuple[Steps, Floats]] = {}
        self._thinned_at = 0

    def __len__(self) -> int:
        """Return how many steps are kept."""
        return len(self.kept_steps())

    def append(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Append at most `MAX_APPENDED_STEPS` steps, which must increase, with values of shape (T, S, L)."""
        self._check(steps_T, values_TSL)
        end = self._len + len(steps_T)
        if end > len(self._steps_T):
            self._make_room(len(steps_T))
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
        if values_TSL.shape[1:] != self.shape:
            raise ValueError(f"step {first} has values of shape {values_TSL.shape[1:]}, expected {self.shape}")

    def extend(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Take over many recorded steps at once, as they were read from disk. The table must be empty."""
        assert self._len == 0, "only an empty table takes over rows"
        recent = min(len(steps_T), WINDOW)
        split = len(steps_T) - recent
        self._archive(steps_T[:split], values_TSL[:split])
        self._steps_T[:recent], self._values_TSL[:recent] = steps_T[split:], values_TSL[split:]
        self._len = recent
        self.last_step = int(steps_T[-1]) if len(steps_T) else -1

    def truncate(self, step: int) -> None:
        """Forget the steps after `step`."""
        steps_T, values_TSL = self.rows(thin=False)
        stay_T = steps_T <= step
        self._clear()
        self.extend(steps_T[stay_T], values_TSL[stay_T])

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the newest steps and their values."""
        newest = slice(max(0, self._len - WINDOW), self._len)
        return {"steps": self._steps_T[newest].copy(), "values": self._values_TSL[newest].copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace everything recorded since the first step of `state` by the steps of `state`."""
        if not len(state["steps"]):
            return
        steps_T, values_TSL = self.rows(thin=False)
        older_T = steps_T < state["steps"][0]
        self._clear()
        self.extend(
            np.concatenate([steps_T[older_T], state["steps"]]),
            np.concatenate([values_TSL[older_T], state["values"]]),
        )

    def steps(self, length: int = WINDOW) -> Steps:
        """Return the newest recorded steps, at most `length` of them, oldest first."""
        assert length <= WINDOW, f"a window has at most {WINDOW} steps"
        return self._steps_T[max(0, self._len - length) : self._len]

    def window(self, statistic: str, length: int = WINDOW) -> Floats:
        """Return a statistic over the newest recorded steps, of shape (at most length, L), oldest first."""
        assert length <= WINDOW, f"a window has at most {WINDOW} steps"
        return self._values_TSL[max(0, self._len - length) : self._len, self.columns[statistic]]

    def newest(self, statistic: str) -> Floats:
        """Return a statistic at the newest step, of shape (L,)."""
        newest_L: Floats = self._values_TSL[self._len - 1, self.columns[statistic]]
        return newest_L

    def since(self, step: int) -> tuple[Steps, Floats]:
        """Return what was recorded after a step, which must lie in the window before the last `append`.

        Returns:
            Steps (T,) and values (T, S, L).
        """
        first = int(np.searchsorted(self._steps_T[: self._len], step, side="right"))
        return self._steps_T[first : self._len], self._values_TSL[first : self._len]

    def series(self, statistic: str) -> tuple[Steps, Floats]:
        """Return all that is kept of a statistic: steps (T,) and values (T, L), oldest first."""
        i = self.columns[statistic]
        steps_T = self._all_steps()
        values_TL = np.concatenate([*(v[:, i] for _, v in self._old.values()), self._values_TSL[: self._len, i]])
        keep_T = _select(self._keep, steps_T)
        return steps_T[keep_T], values_TL[keep_T]

    def rows(self, *, thin: bool = True) -> tuple[Steps, Floats]:
        """Return all that is kept: steps (T,) and values (T, S, L), oldest first.

        Args:
            thin: Leave out what is still here but need not be kept any more.
        """
        steps_T = self._all_steps()
        values_TSL = np.concatenate([*(v for _, v in self._old.values()), self._values_TSL[: self._len]])
        if not thin:
            return steps_T, values_TSL
        keep_T = _select(self._keep, steps_T)
        return steps_T[keep_T], values_TSL[keep_T]

    def kept_steps(self) -> Steps:
        """Return the steps that are kept, of shape (T,)."""
        steps_T = self._all_steps()
        return steps_T[_select(self._keep, steps_T)]

    def segment(self, index: int) -> tuple[Steps, Floats]:
        """Return what is here of one segment: steps (T,) and values (T, S, L), also those not kept any more."""
        first, last = index * self.segment_length, (index + 1) * self.segment_length
        recent = slice(*np.searchsorted(self._steps_T[: self._len], [first, last]).tolist())
        steps_T, values_TSL = self._steps_T[recent], self._values_TSL[recent]
        if index not in self._old:
            return steps_T, values_TSL
        old_steps_T, old_values_TSL = self._old[index]
        return np.concatenate([old_steps_T, steps_T]), np.concatenate([old_values_TSL, values_TSL])

    def _all_steps(self) -> Steps:
        return np.concatenate([*(s for s, _ in self._old.values()), self._steps_T[: self._len]])

    def _make_room(self, count: int) -> None:
        """See to it that so many steps fit behind the newest."""
        if self._len > WINDOW:
            self._slide()
        more = self._len + count - len(self._steps_T)
        if more > 0:  # many at once
            self._steps_T = np.concatenate([self._steps_T, np.empty(more, np.int64)])
            self._values_TSL = np.concatenate([self._values_TSL, np.empty((more, *self.shape), self.dtype)])

    def _slide(self) -> None:
        """Move all but the newest window to the older part."""
        shift = self._len - WINDOW
        self._archive(self._steps_T[:shift].copy(), self._values_TSL[:shift].copy())
        for first in range(0, WINDOW, shift):  # in pieces that overlap with nothing, and so need no copy
            piece = slice(first, min(first + shift, WINDOW))
            source = slice(piece.start + shift, piece.stop + shift)
            self._steps_T[piece], self._values_TSL[piece] = self._steps_T[source], self._values_TSL[source]
        self._len = WINDOW
        if self.last_step // self.segment_length != self._thinned_at:
            self._thin()

    def _archive(self, steps_T: Steps, values_TSL: Floats) -> None:
        """Put steps that are no longer recent into their segments."""
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
        """Drop older steps that need not be kept any more; only the segments that lose some are touched."""
        steps_T = self._all_steps()
        dropped_T = steps_T[~_select(self._keep, steps_T)]
        for index in set((dropped_T // self.segment_length).tolist()):
            if index in self._old:
                steps, values = self._old[index]
                stay = ~among(steps, dropped_T)
                self._old[index] = (steps[stay], values[stay])
                if not stay.any():
                    del self._old[index]
        self._thinned_at = self.last_step // self.segment_length

    def _clear(self) -> None:
        self._old.clear()
        self._len = 0
        self.last_step = -1
        self._thinned_at = 0


def _select(keep: Callable[[Steps], NDArray[np.bool_]], steps_T: Steps) -> NDArray[np.bool_]:
    """Return which steps a policy keeps; none of no steps."""
    return keep(steps_T) if len(steps_T) else np.zeros(0, np.bool_)
