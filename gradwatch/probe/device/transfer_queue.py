"""Queue transfers to the host without waiting, and complete them some steps later, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.probe.device.sync import HostTransfer

MAX_IN_FLIGHT = 64
"""Maximum number of transfers in flight; the next one waits for the oldest. Replays of a CUDA graph, one launch a step,
can be this far ahead of a GPU."""

Values = Mapping[str, NDArray[Any]]


@final
class TransferQueue:
    """Transfers of rows to the host. Each has a function that is called with the values."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[HostTransfer, Callable[[Values], None]]] = deque()

    def __len__(self) -> int:
        """Return the number of transfers in flight."""
        return len(self._in_flight)

    def send(self, tensors: Mapping[str, Tensor], then: Callable[[Values], None]) -> None:
        """Start a transfer.

        Args:
            tensors: By name, all on one device; they may change as soon as this method returns.
            then: Function that `drain` calls with the values, in the order of sending.
        """
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._complete_one()
        self._in_flight.append((HostTransfer(tensors), then))

    def drain(self, *, wait: bool = False) -> None:
        """Complete the transfers that are ready.

        Args:
            wait: Whether to wait for all transfers in flight.
        """
        # only the oldest is tested: rows must arrive in order
        while self._in_flight and (wait or self._in_flight[0][0].is_ready):
            self._complete_one()

    def _complete_one(self) -> None:
        transfer, then = self._in_flight.popleft()
        then(transfer.values())


@final
class DeviceClock:
    """Measure the time that a device spends on spans of work, with events in its stream.

    Args:
        device: The device; only a GPU is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_measuring = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> Callable[[], None]:
        """Begin a span, and return the function that ends it."""
        # a captured event would belong to the CUDA graph
        if not self._is_measuring or torch.cuda.is_current_stream_capturing():
            return _nothing
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        begun.record(stream)

        def end() -> None:
            ended.record(stream)
            self._spans.append((begun, ended))

        return end

    def collect(self) -> Callable[[], float]:
        """Return a function that returns the seconds of all spans since the last call.

        Call the returned function once the device has completed the spans.
        """
        spans, self._spans = self._spans, []
        # CUDA events measure milliseconds
        return lambda: 1e-3 * sum(begun.elapsed_time(ended) for begun, ended in spans)


def _nothing() -> None:
    return None
