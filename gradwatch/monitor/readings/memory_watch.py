"""Watch the memory in use once a second: emit an event when it will be full, or when it is fragmented."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import final

import torch

from gradwatch.attempts import Attempts
from gradwatch.events import Observation
from gradwatch.monitor.best_effort import best_effort
from gradwatch.probe.memory.growth import GrowthJudge, find_fragmentation
from gradwatch.probe.memory.in_use import cuda_memory_left, cuda_statistics, host_memory, host_memory_left
from gradwatch.records import Event


@final
class MemoryWatch:
    """Emits the first event of each kind about memory.

    Args:
        device: A CUDA device, or None for the memory of the process.
        total_steps: Planned optimizer steps, or None if unknown.
        known: Events already recorded.
        emit: Called with each event.
        attempts: Counts the failures of each feature.
    """

    def __init__(
        self,
        device: torch.device | None,
        *,
        total_steps: int | None,
        known: Iterable[Event],
        emit: Callable[[Event], None],
        attempts: Attempts,
    ) -> None:
        self.attempts = attempts
        self._device, self._emit = device, emit
        self._growth = GrowthJudge(total_steps)
        self._known = {event.kind for event in known}

    @best_effort("the memory in use")
    def read(self, step: int) -> None:
        """Read the memory at a step."""
        for observation in self._observations(step):
            if observation.kind not in self._known:
                self._known.add(observation.kind)
                self._emit(observation.at(step))

    def _observations(self, step: int) -> Iterator[Observation]:
        device = self._device
        used: float | None
        left: Callable[[], float]
        if device is not None:
            statistics = cuda_statistics(device)
            used, left = statistics.get("allocated_bytes.all.current"), partial(cuda_memory_left, device)
            yield from filter(None, [find_fragmentation(statistics)])
        else:
            used, left = host_memory(), host_memory_left
        if used is not None and (grows := self._growth.add(step, used, left)):
            yield grows
