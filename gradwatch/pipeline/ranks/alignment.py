"""Bring equal steps of all ranks together: those of this process, and those in the files of the others."""

# R = ranks, T = steps, S = statistics of the run, L = parameters, K = the compared statistics

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.disk.tail import Tail
from gradwatch.history.store import Floats, History, Rows
from gradwatch.records import Event

FOLDER = "ranks"
"""Folder of a run directory with a run directory for each rank but the first."""
STALLED_S = 30.0
"""A rank that has written no step for this time is no longer waited for."""
MAX_WAITING = 4096
"""Maximum number of own steps that wait for the other ranks. Older ones are not compared."""
AT_ONCE = 64
"""Steps that are compared in one go."""

PARAM = ("grad.l2", "grad.absmax", "weight.l2")
PARAM_COLUMNS = [catalogue.PARAM_NAMES.index(name) for name in PARAM]


class ComparedStep(NamedTuple):
    """The compared statistics of one step of a rank, of shapes (S,) and (K, L)."""

    run_S: Floats
    param_KL: Floats


class Aligned(NamedTuple):
    """Equal steps of several ranks.

    Attributes:
        ranks: The ranks, in increasing order.
        steps_T: The steps.
        run_RTS: Statistics of the run.
        param_RTKL: Statistics of the parameters.
    """

    ranks: list[int]
    steps_T: NDArray[np.int64]
    run_RTS: Floats
    param_RTKL: Floats


@final
class Alignment:
    """Collects the steps of all ranks until each has the same ones.

    No process waits for another one: a rank that stalls, dies or has fewer steps is left out.

    Args:
        directory: Run directory of rank 0.
        history: History of rank 0. A rank with other parameters is left out.
    """

    def __init__(self, directory: Path, history: History) -> None:
        world_size = history.info.world_size
        self._statistics = history.run.statistics
        self._names = [layer.name for layer in history.info.layers]
        self._tails = {rank: Tail(directory / FOLDER / str(rank)) for rank in range(1, world_size)}
        self._waiting: dict[int, dict[int, ComparedStep]] = {rank: {} for rank in range(world_size)}
        self._heard_s = dict.fromkeys(self._tails, time.monotonic())

    @property
    def is_complete(self) -> bool:
        """Return whether each rank has written the newest step of this process, or has ended."""
        newest = max(self._waiting[0], default=-1)
        return all(tail.last_step >= newest or tail.is_ended for tail in self._tails.values())

    def has_reached(self, step: int) -> dict[int, bool]:
        """Return for each rank whether it has written a step."""
        return {0: True} | {rank: tail.last_step >= step for rank, tail in self._tails.items()}

    def events(self) -> dict[int, list[Event]]:
        """Return all events of the other ranks so far."""
        return {rank: tail.events() for rank, tail in self._tails.items()}

    def add(self, rows: Rows) -> None:
        """Add steps of this process."""
        mine = self._waiting[0]
        for step, run_S, param_SL in zip(rows.steps_T.tolist(), rows.run_TS, rows.param_TSL, strict=True):
            mine[step] = ComparedStep(run_S.copy(), param_SL[PARAM_COLUMNS])
        while len(mine) > MAX_WAITING:
            del mine[next(iter(mine))]

    def read(self) -> None:
        """Read the new steps of the other ranks."""
        for rank, tail in list(self._tails.items()):
            records_T = tail.read()
            if records_T is None:
                continue
            if not self._is_comparable(tail):
                del self._tails[rank], self._waiting[rank]
                continue
            self._heard_s[rank] = time.monotonic()
            self._waiting[rank] |= {
                int(record["step"]): ComparedStep(record["run"][:, 0], record["param"][PARAM_COLUMNS])
                for record in records_T
            }

    def _is_comparable(self, tail: Tail) -> bool:
        """Return whether a rank has the same parameters and statistics: in pipeline parallelism, it has others."""
        if tail.header is None:
            return False
        fields = tail.header.layouts["steps"].fields
        is_same = fields["run"].statistics == self._statistics and fields["param"].statistics == catalogue.PARAM_NAMES
        return is_same and [layer.name for layer in tail.header.info.layers] == self._names

    def take(self, *, is_last: bool) -> Aligned | None:
        """Return the oldest steps that wait on all ranks, and remove them; None if a rank must be waited for."""
        mine = self._waiting[0]
        if not mine:
            return None
        ranks, first = [0], next(iter(mine))
        for rank, tail in self._tails.items():
            if any(step >= first for step in self._waiting[rank]):
                ranks.append(rank)
            elif not (is_last or time.monotonic() - self._heard_s[rank] > STALLED_S or tail.is_ended):
                return None
        steps = sorted(set.intersection(*(set(self._waiting[rank]) for rank in ranks)))[:AT_ONCE]
        if len(ranks) == 1 or not steps:
            return None
        rows = [[self._waiting[rank][step] for step in steps] for rank in ranks]
        for rank in ranks:
            self._waiting[rank] = {step: kept for step, kept in self._waiting[rank].items() if step > steps[-1]}
        return Aligned(
            ranks,
            np.array(steps),
            np.array([[kept.run_S for kept in of_rank] for of_rank in rows]),
            np.array([[kept.param_KL for kept in of_rank] for of_rank in rows]),
        )
