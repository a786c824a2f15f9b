"""Detect a sampler that yields two epochs in the same order because `set_epoch` was not called between them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from gradwatch.attempts import Attempts
from gradwatch.events import RANK_ORDER_REPEATED
from gradwatch.probe.call_listeners import CallListeners, Function
from gradwatch.records import Event

PART = "the check of the order of samples"


@dataclass(slots=True)
class _Pass:
    """A pass over the data of a sampler, with the epoch number of the pass before and its number of optimizer steps."""

    data: weakref.ref[Any]
    epoch: int
    first_step: int
    before: tuple[int, int] = (-1, 0)


@final
class EpochWatch:
    """Compares the passes of a training over its samplers.

    Two passes have the same order if the sampler has the same epoch number in both, and shuffles. The second one must
    have as many optimizer steps as the first: a search for a learning rate, or a look at a batch, ends earlier.

    Args:
        model: A pass counts if it begins while this model trains.
        emit: Called with one event.
        attempts: Counts failures.

    Attributes:
        step: The optimizer step in progress. The owner of the watch counts it.
    """

    def __init__(self, model: nn.Module, emit: Callable[[Event], None], attempts: Attempts) -> None:
        self._model, self._emit, self._attempts = model, emit, attempts
        self._passes: dict[tuple[type[Any], int, object], _Pass] = {}
        self.step, self._is_over = 0, False

    def attach(self, step: int) -> None:
        """Observe all samplers until `remove`, starting at an optimizer step. A discarded watch observes nothing."""
        self.step = step
        for listeners in PASS_LISTENERS:
            listeners.add(self)

    def remove(self) -> None:
        """Undo `attach`. The last watch restores the classes of torch."""
        for last in self._passes.values():
            self._compare(last)
        for listeners in PASS_LISTENERS:
            listeners.remove(self)

    def begin(self, sampler: Any) -> None:
        """Note that a pass over a sampler begins."""
        self._attempts.run(PART, functools.partial(self._begin, sampler))

    def _begin(self, sampler: Any) -> None:
        epoch = getattr(sampler, "epoch", None)
        if not isinstance(epoch, int) or not getattr(sampler, "shuffle", True) or not self._model.training:
            return
        # a loop may make a sampler for each epoch
        data = _data_of(sampler)
        key = type(sampler), id(data), getattr(sampler, "seed", None)
        last, before = self._passes.get(key), (-1, 0)
        if last is not None and last.data() is data:
            self._compare(last)
            num_steps = self.step - last.first_step
            before = (last.epoch, num_steps) if num_steps else last.before  # nothing was trained in a pass of 0 steps
        self._passes[key] = _Pass(weakref.ref(data), epoch, self.step, before)

    def _compare(self, last: _Pass) -> None:
        """Emit the event at the end of a pass that is as long as the one before it."""
        num_steps = self.step - last.first_step
        if not self._is_over and last.before == (last.epoch, num_steps):
            self._is_over = True
            values = {"epoch": last.epoch, "steps": num_steps}
            self._emit(RANK_ORDER_REPEATED.emit(step=last.first_step, values=values))


def _pass_listeners(owner: type[Any], samplers_of: Callable[[Any], Iterable[Any]]) -> CallListeners[EpochWatch]:
    def around(original: Function, watches: CallListeners[EpochWatch]) -> Function:
        def iterate(self: Any) -> Any:
            for watch in watches:
                for sampler in samplers_of(self):
                    watch.begin(sampler)
            return original(self)

        return iterate

    return CallListeners(owner, "__iter__", around)


def _data_of(sampler: Any) -> Any:
    data = getattr(sampler, "dataset", None)
    return sampler if data is None or not hasattr(data, "__weakref__") else data  # a list supports no weak reference


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a DataLoader that take the number of the epoch."""
    outer = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), outer, getattr(outer, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            yield sampler


PASS_LISTENERS = (
    _pass_listeners(DataLoader, _samplers_of),
    _pass_listeners(DistributedSampler, lambda sampler: (sampler,)),
)
"""Watches of each pass over a DataLoader, or over a sampler that a loop uses by itself."""
