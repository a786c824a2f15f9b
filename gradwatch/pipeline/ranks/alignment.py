"""Align equal steps of all ranks: steps of this process, and steps in the files of the others."""

# R = ranks, T = steps, S = statistics of the run, L = parameters, K = the compared statistics

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.disk.ranks import part_of
from gradwatch.history.disk.tail import Tail
from gradwatch.history.store import Floats, History, Rows
from gradwatch.pipeline.ranks.whole_statistics import join_shard
from gradwatch.records import Event, RunInfo

STALLED_S = 30.0
"""A rank that has written no step for this time is no longer waited for."""
SILENT_S = 1.5
"""At the end, a rank without a lock on its part has been killed if it has written nothing for this time. Some file
systems have no locks, and a process writes its steps every second."""
MAX_WAITING = 4096
"""Maximum number of own steps that wait for the other ranks. Older ones are not compared."""
AT_ONCE = 64
"""Number of steps that are compared at once."""

PARAM = ("grad.l2", "grad.absmax", "weight.l2")
GRAD, WEIGHT = slice(0, 2), slice(2, 3)
"""The statistics of gradients and of weights among `PARAM`."""
PARAM_COLUMNS = [catalogue.PARAM_NAMES.index(name) for name in PARAM]


class ComparedStep(NamedTuple):
    """The statistics of one step of a rank."""

    run_S: Floats
    param_SL: Floats


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
        self._tails = {rank: Tail(part_of(directory, rank)) for rank in range(1, world_size)}
        self._waiting: dict[int, dict[int, ComparedStep]] = {rank: {} for rank in range(world_size)}
        self._info = history.info
        # the statistics of whole parameters follow from all of them
        self._columns = slice(None) if history.info.shards else PARAM_COLUMNS
        self._split_L = np.zeros(len(self._names), np.bool_)
        self._split_L[[layer for shard in history.info.shards for layer in shard.layers]] = True
        self._given_up: set[int] = set()
        self._local_steps: set[int] = set()
        self._heard_s = dict.fromkeys(self._tails, time.monotonic())

    @property
    def is_complete(self) -> bool:
        """Return whether each rank has written the newest step of this process, has ended or was killed."""
        newest = max(self._waiting[0], default=-1)
        waited = {rank: tail for rank, tail in self._tails.items() if rank not in self._given_up}
        now_s = time.monotonic()
        return all(
            tail.last_step >= newest or tail.is_ended or (now_s - self._heard_s[rank] > SILENT_S and tail.is_killed)
            for rank, tail in waited.items()
        )

    def awaited(self, step: int, ranks: Iterable[int]) -> set[int]:
        """Return which ranks may still write a step."""
        behind = {r for r in ranks if r in self._tails and self._tails[r].last_step < step} - self._given_up
        ended = {rank for rank in behind if self._tails[rank].is_ended}
        if ended:
            self.read()  # their last steps, which they wrote before they ended
        return {rank for rank in behind - ended if rank in self._tails}

    def give_up(self, ranks: Iterable[int]) -> None:
        """Stop waiting for ranks until they write again."""
        self._given_up.update(ranks)

    def parts(self, step: int, ranks: Iterable[int]) -> dict[int, ComparedStep]:
        """Return a step of the ranks that have written it."""
        return {rank: self._waiting[rank][step] for rank in ranks if step in self._waiting.get(rank, ())}

    def infos(self, ranks: Iterable[int]) -> dict[int, RunInfo]:
        """Return the descriptions of this process and of other ranks."""
        headers = {rank: tail.header for rank, tail in self._tails.items() if rank in set(ranks)}
        return {0: self._info} | {rank: header.info for rank, header in headers.items() if header}

    def mark_local(self, step: int) -> None:
        """Mark a step in which this process has only the statistics of its own shards, before it is added."""
        self._local_steps.add(step)

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
            param_SL = param_SL[self._columns].copy()
            if step in self._local_steps:
                param_SL[:, self._split_L] = np.nan  # not comparable
            mine[step] = ComparedStep(run_S.copy(), param_SL)
        self._local_steps -= {*rows.steps_T.tolist()}
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
            self._given_up.discard(rank)
            self._waiting[rank] |= {
                int(record["step"]): ComparedStep(record["run"][:, 0], record["param"][self._columns])
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
            self._comparable(ranks, np.array([[kept.param_SL for kept in of_rank] for of_rank in rows])),
        )

    def _comparable(self, ranks: list[int], param_RTSL: Floats) -> Floats:
        """Return the compared statistics. Each rank gets the statistics of whole parameters, even if sharded."""
        if not self._info.shards:
            return param_RTSL
        param_RTKL = param_RTSL[:, :, PARAM_COLUMNS]
        infos = self.infos(ranks)
        for i, rank in enumerate(ranks):
            for shard in infos[rank].shards:
                compared = slice(None) if shard.is_split else GRAD  # each rank has whole weights otherwise
                whole_TKL = param_RTKL[i][:, compared]
                if 0 in shard.ranks:  # joined already
                    whole_TKL[:, :, shard.layers] = param_RTKL[0][:, compared][:, :, shard.layers]
                elif not {*shard.ranks} <= {*ranks}:
                    whole_TKL[:, :, shard.layers] = np.nan
                else:
                    for t, whole_KL in enumerate(whole_TKL):
                        parts = {other: param_RTSL[ranks.index(other), t] for other in shard.ranks}
                        whole_KL[:, shard.layers] = join_shard(shard, parts, infos)[PARAM_COLUMNS][compared]
        is_unknown_TKL = np.isnan(param_RTKL).any(0)
        param_RTKL[:, is_unknown_TKL & self._split_L] = np.nan
        return param_RTKL
