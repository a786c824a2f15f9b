"""Rows that a GPU still computes: sent off without waiting, and taken in some steps later, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.probe.device.sync import Parcel

DEPTH = 8
"""Rows under way at most; the next one waits for the oldest. A GPU seldom runs more than a few steps behind."""

Values = Mapping[str, NDArray[Any]]


@final
class Post:
    """A few places of pinned memory, used in turn by rows on their way to the host."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Parcel, Callable[[Values], None]]] = deque()
        self._rooms: list[Tensor] = []

    def __len__(self) -> int:
        """Return how many rows are under way."""
        return len(self._under_way)

    def send(self, tensors: Mapping[str, Tensor], then: Callable[[Values], None]) -> None:
        """Send tensors off.

        Args:
            tensors: By name, all on one device; they may change as soon as this returns.
            then: Called with their values by `deliver`, in the order of sending.
        """
        if len(self._under_way) == DEPTH:
            self._deliver_one()
        self._under_way.append((Parcel(tensors, self._rooms.pop() if self._rooms else None), then))

    def deliver(self, *, wait: bool = False) -> None:
        """Hand over what has arrived.

        Args:
            wait: Whether to wait for all that is under way.
        """
        while self._under_way and (wait or self._under_way[0][0].has_arrived):
            self._deliver_one()

    def _deliver_one(self) -> None:
        parcel, then = self._under_way.popleft()
        values = parcel.open()
        self._rooms.append(parcel.room)
        then(values)


@final
class DeviceClock:
    """Measures what the device spends on stretches of work, by events in its stream; no GPU, no time."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, device: torch.device) -> Callable[[], None]:
        """Begin a stretch, and return what ends it."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return _nothing
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()

        def end() -> None:
            ended.record()
            self._spans.append((begun, ended))

        return end

    def take(self) -> Callable[[], float]:
        """Return what tells the seconds since the last call, once the device has come so far, and begin anew."""
        spans, self._spans = self._spans, []
        return lambda: 1e-3 * sum(begun.elapsed_time(ended) for begun, ended in spans)


def _nothing() -> None:
    return None
