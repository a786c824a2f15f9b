"""Read the gradients just before torch's functions clip them, so that a loop needs no extra call."""

# P = parameter tensors of one optimizer, C = parameter tensors that a call clips

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.monitor.best_effort import best_effort
from gradwatch.monitor.fast_path import FastPath
from gradwatch.monitor.overhead import OverheadMeter
from gradwatch.monitor.readings.loss_scale import LossScaleReader
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker
from gradwatch.monitor.readings.update_reader import UpdateReader
from gradwatch.probe.gradients import clip_calls
from gradwatch.probe.inert_hook import inert_hook, remove_hooks

MAX_CALLS = 4096
"""Number of sets of parameters to remember. A loop may clip each of 1,000 parameters by itself."""


class _Part(NamedTuple):
    """The parameters of one optimizer that a call clips, with their indices among the optimizer's parameters."""

    tracker: OptimizerTracker
    params: Sequence[Tensor]
    index_C: NDArray[np.intp]
    columns_C: Tensor


class _Used(NamedTuple):
    """The first gradient of an update, before it."""

    param: Tensor
    grad: weakref.ref[Tensor]
    version: int

    def is_unchanged(self) -> bool:
        """Return whether nothing has written to the gradient, cleared it or replaced it since."""
        grad = self.param.grad
        return grad is not None and self.grad() is grad and grad._version == self.version


@final
class ClipReader:
    """Reads the gradients of an optimizer when torch clips the first of them, and keeps the factors of the clipping.

    Gradients that the newest update has used are not read, since they are not those of the next one. The reading is
    dropped if a later call clips gradients that were written to since the last call, as when a loop clips after each
    micro-batch.

    Args:
        trackers: The optimizers.
        updates: Reads the gradients.
        fast_path: Records most steps natively, or None.
        leave_fast_path: Continues on the full path.
        loss_scale: Reads the GradScaler of the loop.
        meter: All clocks.
    """

    def __init__(
        self,
        trackers: Sequence[OptimizerTracker],
        updates: UpdateReader,
        *,
        fast_path: FastPath | None,
        leave_fast_path: Callable[[], None],
        loss_scale: LossScaleReader,
        meter: OverheadMeter,
    ) -> None:
        self.attempts = updates.attempts
        self._trackers, self._updates, self._meter = trackers, updates, meter
        self._fast_path, self._leave_fast_path, self._loss_scale = fast_path, leave_fast_path, loss_scale
        self._indices = [{id(p): i for i, p in enumerate(tracker.params)} for tracker in trackers]
        self._known: dict[tuple[int, ...], list[_Part]] = {}
        self._marks: dict[int, int] = {}
        """Version of the first gradient of each call since the last reading, by the `id` of its parameter."""
        self._new: list[OptimizerTracker] = []  # optimizers whose updates are to be followed
        self._used: dict[OptimizerTracker, _Used | None] = {}  # of the optimizers whose gradients were clipped
        self._late: set[OptimizerTracker] = set()  # those whose gradients the call in progress clips too late
        self._handles: list[RemovableHandle] = []

    @best_effort("the reading before clipping")
    def before_clip(self, params: Sequence[Tensor]) -> None:
        """Read the gradients of the optimizers that hold any of the parameters, unless they are read or used."""
        self._late.clear()
        for part, param in self._parts(params):
            if self._is_used(part.tracker):
                self._late.add(part.tracker)
                continue
            if self._loss_scale.is_scaled(part.tracker.optimizer):
                continue  # clipped before `unscale_`: the gradients still have the loss scale
            version = _version(param)
            is_continued = self._marks.get(id(param), version) == version
            if self._fast_path is not None and self._fast_path.is_active:
                is_read = self._fast_path.native.before_clip(is_continued)
                if is_read is not None:
                    self._forget_marks(part.tracker) if is_read else None
                    continue
                self._leave_fast_path()
            if not (part.tracker.is_observed and is_continued):
                self._forget_marks(part.tracker)
                began = time.perf_counter()
                self._updates.read_unclipped(part.tracker)
                self._meter.hooks_s += time.perf_counter() - began

    @best_effort("the reading before clipping")
    def after_clip(self, params: Sequence[Tensor], factor: float | Tensor | None) -> None:
        """Keep the factor of the gradients that were just clipped; None if the factors differ or are unknown."""
        for part, param in self._parts(params):
            if part.tracker in self._late:
                self._mark_used(part.tracker)  # a loop may clip parameter by parameter
                continue
            self._marks[id(param)] = _version(param)
            if self._fast_path is not None and self._fast_path.is_active:
                self._fast_path.native.clip(float("nan") if factor is None else float(factor), part.columns_C)
            elif part.tracker.is_observed:
                part.tracker.clipping.scale(factor, part.index_C)

    def begin(self) -> None:
        """Follow the updates of optimizers whose gradients were clipped for the first time, outside of their hooks."""
        for tracker in self._new:
            mark = inert_hook(functools.partial(self._mark_used, tracker))
            self._handles.append(tracker.optimizer.register_step_pre_hook(mark))
        self._new.clear()

    def close(self) -> None:
        """Remove all hooks, and restore torch's clip functions."""
        clip_calls.forget(self)
        remove_hooks(self._handles)

    def _is_used(self, tracker: OptimizerTracker) -> bool:
        """Return whether the newest update has used the gradients as they are. Only loops that clip have the hook."""
        if tracker not in self._used:
            self._used[tracker] = None
            # a hook of the optimizer may clip: torch iterates over its hooks until the update is over
            self._new.append(tracker)
            self._leave_fast_path()
        used = self._used[tracker]
        return used is not None and used.is_unchanged()

    def _mark_used(self, tracker: OptimizerTracker, *_: object) -> None:
        present = ((p, p.grad) for p in tracker.params if p.grad is not None)
        first = next(present, None)
        self._used[tracker] = first and _Used(first[0], weakref.ref(first[1]), first[1]._version)

    def _forget_marks(self, tracker: OptimizerTracker) -> None:
        for param in tracker.params if self._marks else ():
            self._marks.pop(id(param), None)

    def _parts(self, params: Sequence[Tensor]) -> Iterator[tuple[_Part, Tensor]]:
        """Yield the part of each optimizer that has gradients, with the first parameter that has one."""
        key = tuple(map(id, params))  # the watched parameters live as long as this object, so their ids are unique
        parts = self._known.get(key)
        if parts is None:
            if len(self._known) >= MAX_CALLS:
                self._known.clear()
            parts = self._known[key] = [*self._split(params)]
        for part in parts:
            first = next((p for p in part.params if p.grad is not None), None)
            if first is not None:
                yield part, first

    def _split(self, params: Sequence[Tensor]) -> Iterator[_Part]:
        for tracker, indices in zip(self._trackers, self._indices, strict=True):
            held = {indices[id(p)]: p for p in params if id(p) in indices}
            if held:
                index_C = np.array([*held], np.intp)
                yield _Part(tracker, [*held.values()], index_C, torch.from_numpy(index_C.astype(np.int64)))


def _version(param: Tensor) -> int:
    assert param.grad is not None, "only parameters with a gradient are asked"
    return param.grad._version
