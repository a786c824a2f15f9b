"""Choose the recorded steps that charts show, and read statistics at them."""

# T = recorded steps of a table, P = points of a chart, L = layers of the table

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.history.table import Table
from gradwatch.records import Finding

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]

MARGIN_STEPS = 32
"""Steps before and after the onset and the report of a finding that all become points."""


@final
class TableExcerpt:
    """Recorded steps of a table that become points. A point stands for all steps since the point before it.

    Args:
        steps_T: Recorded steps, up to the last point.
        chosen_P: Indices of the points in `steps_T`, increasing. The last one is the last step.
        layers: Layers of the table.
        read: Returns a statistic at `steps_T`, of shape (T, L).

    Attributes:
        steps_P: Steps of the points.
        layers: Layers of the table.
    """

    def __init__(
        self, steps_T: Steps, chosen_P: NDArray[np.intp], layers: tuple[str, ...], read: Callable[[str], Floats]
    ) -> None:
        self.steps_P = steps_T[chosen_P]
        self.layers = layers
        self._chosen_P = chosen_P
        # the first step that a point stands for
        self._starts_P = np.concatenate([chosen_P[:1] * 0, chosen_P[:-1] + 1])
        self._read = functools.cache(read)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.steps_P)

    def at(self, statistic: str) -> Floats:
        """Return a statistic at the points, of shape (P, L)."""
        return self._read(statistic)[self._chosen_P]

    def mean(self, statistic: str) -> Floats:
        """Return the mean of the finite values since the point before, of shape (P, L); nan if there is none."""
        values_TL = self._read(statistic)
        finite_TL = np.isfinite(values_TL)
        sums_PL = np.add.reduceat(np.where(finite_TL, values_TL, 0.0), self._starts_P, dtype=np.float64)
        counts_PL = np.add.reduceat(finite_TL, self._starts_P, dtype=np.int64)
        with np.errstate(invalid="ignore"):  # 0 / 0 is nan
            mean_PL: Floats = sums_PL / counts_PL
        return mean_PL

    def last_known(self, statistic: str) -> Floats:
        """Return the newest value since the point before, of shape (P, L); nan if no step sampled the statistic."""
        values_TL = self._read(statistic)
        place_TL = np.where(np.isnan(values_TL), -1, np.arange(len(values_TL))[:, None])
        place_PL = np.maximum.reduceat(place_TL, self._starts_P)
        # a place before the interval of its point cannot occur: each interval has its own maximum
        known_PL = np.take_along_axis(values_TL, np.maximum(place_PL, 0), axis=0)
        return np.where(place_PL < 0, np.nan, known_PL)

    def count(self, statistic: str, test: Callable[[Floats], NDArray[np.bool_]]) -> NDArray[np.int64]:
        """Return the number of layers that pass a test at each recorded step, the largest since the last point."""
        return np.maximum.reduceat(np.count_nonzero(test(self._read(statistic)), axis=1), self._starts_P)

    def nonfinite_steps(self, *statistics: str) -> NDArray[np.int64]:
        """Return the number of steps since the point before at which one of some statistics was not finite."""
        broken_T = ~np.logical_and.reduce([np.isfinite(self._read(name)).all(axis=1) for name in statistics])
        return np.add.reduceat(broken_T, self._starts_P, dtype=np.int64)


class HistoryExcerpt(NamedTuple):
    """Excerpts of the three tables of a history. `run` and `param` have equal steps."""

    run: TableExcerpt
    param: TableExcerpt
    act: TableExcerpt

    @classmethod
    def newest(cls, history: History, *, after: int) -> Self:
        """Return the newest step as the only point. It stands for all steps after a step, within the window."""
        return cls(*(_newest(table, after) for table in (history.run, history.param, history.act)))

    @classmethod
    def over_run(cls, history: History, *, most: int) -> Self:
        """Return points over the whole run, at most `most` for each table, and all steps around findings."""
        near = important_steps((*history.findings, *history.withdrawn))
        return cls(*(_over_run(table, near, most) for table in (history.run, history.param, history.act)))


def important_steps(findings: Iterable[Finding]) -> list[int]:
    """Return the onset and the step of each finding, the most severe and earliest findings first."""
    ordered = sorted(findings, key=lambda f: (-f.severity, f.since, f.step))
    return list(dict.fromkeys(step for f in ordered for step in (f.since, f.step)))


def choose(steps_T: Steps, near: Iterable[int], most: int) -> NDArray[np.intp]:
    """Return the indices of at most `most` steps: those around some steps, and others at equal distances.

    Args:
        steps_T: Recorded steps, increasing.
        near: Steps whose surroundings are wanted, the most important first. They get at most half of the points.
        most: Maximum number of steps, at least 8.
    """
    if len(steps_T) <= most:
        return np.arange(len(steps_T))
    chosen_T = np.zeros(len(steps_T), np.bool_)
    chosen_T[-1] = True
    margin = min(MARGIN_STEPS, most // 4 - 1)
    for step in near:
        more_T = chosen_T | (np.abs(steps_T - step) <= margin)
        if np.count_nonzero(more_T) > most // 2:
            break
        chosen_T = more_T
    wanted = np.linspace(steps_T[0], steps_T[-1], most - np.count_nonzero(chosen_T))
    # thinned steps lie far apart, so several wanted steps may have the same next one
    chosen_T[np.searchsorted(steps_T, wanted)] = True
    return np.flatnonzero(chosen_T)


def _newest(table: Table, after: int) -> TableExcerpt:
    steps_T = table.steps()
    steps_T = steps_T[steps_T > after]
    rows = len(steps_T)
    return TableExcerpt(steps_T, np.arange(rows)[-1:], table.layers, lambda statistic: table.window(statistic, rows))


def _over_run(table: Table, near: Iterable[int], most: int) -> TableExcerpt:
    steps_T = table.kept_steps()
    return TableExcerpt(
        steps_T, choose(steps_T, near, most), table.layers, lambda statistic: table.series(statistic)[1]
    )
