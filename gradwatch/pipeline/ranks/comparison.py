"""Compare the steps of all processes of one distributed training, and emit an event where they begin to differ."""

# R = ranks, T = steps, S = statistics of the run, G = optimizer groups, L = parameters, K = the compared statistics

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.events import (
    BATCH_FINITE,
    BATCH_NONFINITE,
    RANK_BATCHES_EQUAL,
    RANK_GRADIENTS_AGREE,
    RANK_GRADIENTS_DIFFER,
    RANK_LOSS_NONFINITE,
    RANK_MOMENTS_DIFFER,
    RANK_RATES_DIFFER,
    RANK_STATE,
    RANK_WEIGHTS_AGREE,
    RANK_WEIGHTS_DIFFER,
    EventKind,
)
from gradwatch.history.store import History, Rows
from gradwatch.pipeline.ranks.alignment import GRAD, WEIGHT, Aligned, Alignment
from gradwatch.pipeline.ranks.changes import CHANGES, find_change
from gradwatch.pipeline.ranks.states import (
    TOLERANCE,
    WEIGHT_TOLERANCE,
    StateComparison,
    equal_pair,
    find_differing,
    is_due,
)
from gradwatch.records import Event

POLL_S = 0.5
"""Time between two reads of the other ranks' files."""
WAIT_S = 0.05
"""Time between two reads while the run ends."""
EQUAL_BATCHES = 3
"""Successive equal batches that are not chance: a constant batch may begin an epoch."""
MAX_EVENTS = 10
"""Maximum number of events of a kind, for ranks that agree and differ in turn."""
MAX_NAMED = 8
"""Maximum number of parameters that get an event each. If more differ, one event is for the whole model."""

NORM, CLIPPED = "grad_norm.before_clip", "grad_norm.after_clip"
Mask = NDArray[np.bool_]


@final
class RankComparison:
    """Compares this process, rank 0, with the other ranks, which write their runs into `ranks/` of its directory.

    Args:
        alignment: Reads the files of the other ranks.
        history: History of rank 0. A rank with other parameters is not compared.
        has_own_batches: Whether each rank has its own batches, so that equal batches are a fault.
    """

    def __init__(self, alignment: Alignment, history: History, *, has_own_batches: bool) -> None:
        info, statistics = history.info, history.run.statistics
        self._alignment = alignment
        self._has_own_batches = has_own_batches
        self._columns = {name: i for i, name in enumerate(statistics)}
        self._rates = [i for i, name in enumerate(statistics) if name.startswith("lr.")]
        self._names = [layer.name for layer in info.layers]
        self._polled_s = -np.inf
        self._state: dict[str, bool] = {}
        self._num_events: dict[str, int] = {}
        self._states = StateComparison(info.world_size, has_scale=info.loss_scaling, has_own_batches=has_own_batches)
        self._num_equal = 0
        self._own_changes: list[Event] = []
        self._sampled_step = -1

    def add(self, rows: Rows) -> None:
        """Add steps of this process."""
        self._alignment.add(rows)
        for step, run_S in zip(rows.steps_T.tolist(), rows.run_TS, strict=True):
            if is_due(step):
                before, after = run_S[self._columns[NORM]], run_S[self._columns[CLIPPED]]
                self._states.clip_factors[step] = float(after / before) if before else 1.0

    def add_event(self, event: Event) -> None:
        """Add an event of this process."""
        if event.kind == RANK_STATE.name:
            self._states.add(0, event)
        elif event.kind in CHANGES:
            self._own_changes.append(event)

    def poll(self) -> list[Event]:
        """Return the events of the steps that all ranks have recorded since the last call."""
        if time.monotonic() - self._polled_s < POLL_S:
            return []
        self._polled_s = time.monotonic()
        self._alignment.read()
        return self._compare_all(is_last=False)

    def wait(self, limit_s: float) -> list[Event]:
        """Return the last events of the run, after the other ranks have written the newest step of this one.

        Args:
            limit_s: Maximum time to wait.
        """
        until_s = time.monotonic() + limit_s
        self._alignment.read()
        while not self._alignment.is_complete and time.monotonic() < until_s:
            time.sleep(WAIT_S)
            self._alignment.read()
        return self._compare_all(is_last=True)

    def _compare_all(self, *, is_last: bool) -> list[Event]:
        events: list[Event] = []
        while (aligned := self._alignment.take(is_last=is_last)) is not None:
            events += self._compare(aligned)
        return events + self._compare_states()

    def _compare_states(self) -> list[Event]:
        if self._states.next_step is None:  # few steps have a state
            return []
        self._states.is_apart = self._state.get("gradients", False)
        for rank, events in self._alignment.events().items():
            for event in events:
                if event.kind == RANK_STATE.name:
                    self._states.add(rank, event)
        return list(self._states.compare(self._alignment.has_reached(self._states.next_step)))

    def _compare(self, aligned: Aligned) -> Iterator[Event]:
        yield from self._losses(aligned)
        yield from self._settings(aligned)
        yield from self._gradients(aligned)
        yield from self._weights(aligned)
        if self._has_own_batches:
            self._states.has_batches |= bool(np.isfinite(aligned.run_RTS[:, :, self._columns["batch_hash"]]).any())
            yield from self._equal_batches(aligned)

    def _losses(self, aligned: Aligned) -> Iterator[Event]:
        """Yield the rank with the first loss that is not finite."""
        is_bad_RT = ~np.isfinite(aligned.run_RTS[:, :, self._columns["loss"]])
        # a loop may pass its loss on some ranks only; a NaN that is real reaches the gradients
        is_bad_RT &= ~np.isfinite(aligned.run_RTS[:, :, self._columns[NORM]]).all(0)
        split = np.flatnonzero(is_bad_RT.any(0) & ~is_bad_RT.all(0))
        if len(split) and self._is_first("loss"):
            t = int(split[0])
            rank, step = aligned.ranks[int(is_bad_RT[:, t].argmax())], int(aligned.steps_T[t])
            yield RANK_LOSS_NONFINITE.emit(step=step, values={"rank": rank, "inputs": self._inputs(rank, step)})

    def _inputs(self, rank: int, step: int) -> float:
        kinds = {event.kind for event in self._alignment.events().get(rank, ()) if event.step == step}
        if BATCH_NONFINITE.name in kinds:
            return 1.0
        return 0.0 if BATCH_FINITE.name in kinds else -1.0

    def _settings(self, aligned: Aligned) -> Iterator[Event]:
        rate_RTG = aligned.run_RTS[:, :, self._rates]
        differs_RTG = find_differing(rate_RTG)
        is_odd_T = np.asarray(differs_RTG.any((0, 2)))
        for t in self._changes("rates", is_odd_T):
            if not is_odd_T[t]:
                continue
            g = int(differs_RTG[:, t].any(0).argmax())
            i = int(differs_RTG[:, t, g].argmax())
            values = {
                "rank": aligned.ranks[i],
                "group": g,
                "rate": float(rate_RTG[i, t, g]),
                "usual": float(np.median(np.delete(rate_RTG[:, t, g], i))),
            }
            yield RANK_RATES_DIFFER.emit(step=int(aligned.steps_T[t]), values=values)

    def _gradients(self, aligned: Aligned) -> Iterator[Event]:
        # a NaN that came from one rank reaches all of them, in other gradients
        before_RT, after_RT = (aligned.run_RTS[:, :, self._columns[name]] for name in (NORM, CLIPPED))
        is_finite_T = np.asarray(np.isfinite(before_RT).all(0))
        is_clipped_T = np.asarray((after_RT < before_RT * (1 - TOLERANCE)).any(0))
        yield from self._parameters(
            aligned, "gradients", GRAD, is_finite_T, RANK_GRADIENTS_DIFFER, RANK_GRADIENTS_AGREE, is_clipped_T
        )

    def _weights(self, aligned: Aligned) -> Iterator[Event]:
        is_sampled_T = np.asarray(np.asarray(np.isfinite(aligned.param_RTKL[:, :, WEIGHT]).any((2, 3))).all(0))
        events = self._parameters(
            aligned, "weights", WEIGHT, is_sampled_T, RANK_WEIGHTS_DIFFER, RANK_WEIGHTS_AGREE, None
        )
        sampled = [self._sampled_step, *aligned.steps_T[is_sampled_T].tolist()]
        self._sampled_step = sampled[-1]
        for event in events:
            if event.kind == RANK_WEIGHTS_DIFFER.name:
                yield from self._dated(event, max(step for step in sampled if step < event.step))
            else:
                yield event

    def _dated(self, event: Event, after: int) -> Iterator[Event]:
        """Yield weights that differ, at the step where something happened on some ranks only, if that is known."""
        known = {0: self._own_changes} | self._alignment.events()
        change = find_change(known, after=after, until=event.step)
        if change is None:
            yield event
            return
        if change.is_of_optimizer:
            yield RANK_MOMENTS_DIFFER.emit(step=change.step, values={"rank": change.rank})
        yield replace(event, step=change.step, values=event.values | {"rank": change.rank})

    def _parameters(
        self,
        aligned: Aligned,
        what: str,
        columns: slice,
        is_known_T: Mask,
        differ: EventKind,
        agree: EventKind,
        is_clipped_T: Mask | None,
    ) -> Iterator[Event]:
        known = np.flatnonzero(is_known_T)
        values_RTKL = aligned.param_RTKL[:, known, columns]
        differs_RTL = np.asarray(
            find_differing(values_RTKL, WEIGHT_TOLERANCE if agree is RANK_WEIGHTS_AGREE else TOLERANCE).any(2)
        )
        differs_TL = np.asarray(differs_RTL.any(0))
        is_odd_T = np.asarray(differs_TL.any(1))
        for t in self._changes(what, is_odd_T):
            step = int(aligned.steps_T[known[t]])
            if not is_odd_T[t]:
                yield agree.emit(step=step)
                continue
            odd_L = np.flatnonzero(differs_TL[t])
            low, high = values_RTKL[:, t, 0].min(0), values_RTKL[:, t, 0].max(0)
            with np.errstate(all="ignore"):
                difference = float(np.nanmax(((high - low) / high)[odd_L], initial=0.0))
            odd = np.flatnonzero(differs_RTL[:, t].any(1))
            values: dict[str, float] = {
                "rank": aligned.ranks[odd[0]] if len(odd) == 1 else -1,
                "parameters": len(odd_L),
                "difference": difference,
            }
            if is_clipped_T is not None:
                values["clipped"] = float(is_clipped_T[known[t]])
            named = [self._names[k] for k in odd_L] if len(odd_L) <= min(MAX_NAMED, len(self._names) // 2) else [None]
            for name in named:
                yield differ.emit(step=step, layer=name, values=values)

    def _equal_batches(self, aligned: Aligned) -> Iterator[Event]:
        hash_RT = aligned.run_RTS[:, :, self._columns["batch_hash"]]
        for t, step in enumerate(aligned.steps_T.tolist()):
            pair = equal_pair(hash_RT[:, t])
            self._num_equal = self._num_equal + 1 if pair else 0
            if pair and self._num_equal == EQUAL_BATCHES and self._is_first("equal batches"):
                onset = max(step - EQUAL_BATCHES + 1, 0)
                rank, other = (aligned.ranks[i] for i in pair)
                yield RANK_BATCHES_EQUAL.emit(step=onset, values={"rank": rank, "other": other})

    def _changes(self, what: str, is_odd_T: Mask) -> Iterator[int]:
        """Yield the index of each step at which a state is known first, or has changed."""
        for t, is_odd in enumerate(is_odd_T.tolist()):
            if self._state.get(what) != is_odd:
                self._state[what] = is_odd
                self._num_events[what] = self._num_events.get(what, 0) + 1
                if self._num_events[what] <= MAX_EVENTS:
                    yield t

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._state
        self._state[what] = True
        return is_first
