"""Join the statistics of sharded parameters from the rows of all ranks, without any exchange between processes."""

# R = ranks, T = steps, L = parameters, S = statistics

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.events import SHARDS_LOCAL, SHARDS_WHOLE
from gradwatch.history.store import Floats, History, Rows
from gradwatch.pipeline.ranks.alignment import STALLED_S, Alignment, ComparedStep
from gradwatch.pipeline.ranks.whole_statistics import join_shard
from gradwatch.records import Event

MAX_HELD = 1024
"""Maximum number of steps of this process that wait for the other ranks. Older ones are taken as they are."""
WAIT_S = 0.05
"""Time between two reads of the other ranks' files while the run ends."""

BEFORE, *OTHERS = NORMS = ("grad_norm.before_clip", "grad_norm.after_clip", "grad_norm.micro")
NONFINITE = catalogue.PARAM_NAMES.index("grad.nonfinite")


@final
class ShardJoin:
    """Holds the rows of rank 0 until the other ranks have written their part of the step, and joins the parts.

    Each rank reads the statistics of its own shards, and writes them to its own files. No process waits for another
    one: a rank that stalls, dies or never watches is no longer waited for after `STALLED_S`. Rows without its part keep
    the statistics of the shards on rank 0, and an event says so.

    Args:
        alignment: Reads the files of the other ranks.
        history: History of rank 0.
        total_norm: Returns the norm of all gradients, from their statistics and a mask of the parameters that count.
    """

    def __init__(
        self, alignment: Alignment, history: History, total_norm: Callable[[Floats, NDArray[np.bool_] | None], float]
    ) -> None:
        self._alignment, self._total_norm = alignment, total_norm
        self._shards = history.info.shards
        self._partners = sorted({rank for shard in self._shards for rank in shard.ranks} - {history.info.rank})
        self._norms = {name: history.run.statistics.index(name) for name in NORMS}
        owned_L = np.array([layer.group is not None for layer in history.info.layers], np.bool_)
        self._owned_L = owned_L if owned_L.any() else None  # a loop that moves the weights by hand holds none
        self._held: deque[tuple[Rows | Event, float]] = deque()
        self._ready: list[Rows | Event] = []
        self._num_steps = 0
        self._is_whole = True
        self._end_s = math.inf

    @property
    def is_holding(self) -> bool:
        """Return whether a row or an event waits."""
        return bool(self._held or self._ready)

    def end(self, limit_s: float) -> None:
        """Let the next call of `take` return all items, after at most `limit_s` of waiting for the other ranks."""
        self._end_s = time.monotonic() + limit_s

    def hold(self, items: Iterable[Rows | Event]) -> None:
        """Hold items until `take` returns them."""
        for item in items:
            # one row each: the ranks may have different numbers of steps
            parts = [item] if isinstance(item, Event) else [item.part(t, t + 1) for t in range(item.num_steps)]
            self._held.extend((part, time.monotonic()) for part in parts)
            self._num_steps += sum(isinstance(part, Rows) for part in parts)

    def take(self) -> list[Rows | Event]:
        """Return the oldest held items that wait for no other rank, in the order of arrival."""
        self._alignment.read()
        self._release()
        while self._held and self._end_s < math.inf:
            time.sleep(WAIT_S)
            self._alignment.read()
            self._release()
        ready, self._ready = self._ready, []
        return ready

    def take_all(self) -> list[Rows | Event]:
        """Return all held items, with the statistics of the shards on rank 0."""
        ready, self._ready = [*self._ready, *(item for item, _ in self._held)], []
        self._held.clear()
        return ready

    def _release(self) -> None:
        while self._held:
            item, since_s = self._held[0]
            if isinstance(item, Event):
                self._ready.append(item)
                self._held.popleft()
                continue
            step = int(item.steps_T[0])
            if awaited := self._alignment.awaited(step, self._partners):
                now_s = time.monotonic()
                if now_s < min(since_s + STALLED_S, self._end_s) and self._num_steps <= MAX_HELD:
                    return
                self._alignment.give_up(awaited)
            self._ready += [*self._join(item, step)]
            self._held.popleft()
            self._num_steps -= 1

    def _join(self, rows: Rows, step: int) -> Iterator[Rows | Event]:
        """Yield the row with the statistics of whole parameters, and an event if parts are missing, or no longer."""
        parts = {0: ComparedStep(rows.run_TS[0], rows.param_TSL[0]), **self._alignment.parts(step, self._partners)}
        missing = [rank for rank in self._partners if rank not in parts]
        is_whole = not missing
        if is_whole != self._is_whole:
            self._is_whole = is_whole
            kind, values = (SHARDS_WHOLE, {}) if is_whole else (SHARDS_LOCAL, {"rank": missing[0]})
            yield kind.emit(step=step, values=values)
        if missing:
            self._alignment.mark_local(step)
            yield rows
            return
        param_SL = rows.param_TSL[0].copy()
        for shard in self._shards:
            of_ranks = {rank: parts[rank].param_SL for rank in shard.ranks}
            param_SL[:, list(shard.layers)] = join_shard(shard, of_ranks, self._alignment.infos(shard.ranks))
        run_S = rows.run_TS[0].copy()
        self._join_norms(run_S, param_SL, [parts[rank].run_S for rank in (0, *self._partners)])
        yield rows._replace(run_TS=run_S[None], param_TSL=param_SL[None])

    def _join_norms(self, run_S: Floats, param_SL: Floats, of_ranks: list[Floats]) -> None:
        """Write the norms of all gradients of a step into the statistics of the run."""
        before_R = np.array([of_rank[self._norms[BEFORE]] for of_rank in of_ranks])
        if np.isnan(param_SL[NONFINITE]).all():
            return  # no gradient was read
        norm = run_S[self._norms[BEFORE]] = self._total_norm(param_SL, self._owned_L)
        for name in OTHERS:
            other_R = np.array([of_rank[self._norms[name]] for of_rank in of_ranks])
            with np.errstate(all="ignore"):
                # of clipped gradients, each rank knows only the norm of its own shards
                factor = math.sqrt(np.square(other_R).sum() / np.square(before_R).sum()) if before_R.any() else 1.0
            run_S[self._norms[name]] = norm * factor
