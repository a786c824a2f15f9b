"""Complete rows and feed them to the pipeline, at once or when the device has computed them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, final

from numpy.typing import NDArray
from torch import Tensor

from gradwatch.monitor.best_effort import best_effort
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.overhead import RowCost
from gradwatch.monitor.row import PendingRow, StepRow
from gradwatch.probe.device import sync
from gradwatch.probe.device.transfer_queue import DeviceClock, TransferQueue, Values

Readings = Mapping[str, Tensor | NDArray[Any]]


@final
class RowQueue:
    """Completes rows in order and feeds them to the pipeline.

    Args:
        context: Shared by the parts of the monitor. Deferred rows are completed when the device has computed them, so
            that no step waits for the device.
        device_clock: Measures the time that the device spends.
        has_scaler: Whether the loss is scaled. Scalers overflow by design, so a non-finite norm is then no reason to
            inspect a step.
    """

    def __init__(self, context: MonitorContext, *, device_clock: DeviceClock, has_scaler: bool) -> None:
        self.attempts = context.attempts
        self._context, self._meter = context, context.meter
        self._transfers = TransferQueue() if context.is_deferred else None
        self._device_clock = device_clock
        self._has_scaler = has_scaler

    def __len__(self) -> int:
        """Return the number of rows in flight."""
        return 0 if self._transfers is None else len(self._transfers)

    @best_effort("the recording", is_final=True)
    def submit(self, row: PendingRow, readings: Readings, *, began: float) -> None:
        """Complete a row now, or start the transfer of its readings.

        Args:
            row: The part that the host knows.
            readings: The readings that complete the row.
            began: Clock at which `Monitor.step` was called.
        """
        if self._transfers is None:
            completed = row.complete({name: sync.to_array(reading) for name, reading in readings.items()})
            self._inspect(row, is_validated=row.is_validated, is_non_finite=not self._is_finite(completed))
            # after the inspection, which belongs to the cost of this row
            self._feed(row.builder.step, completed, self._meter.end_row(began), device_s=0.0)
            return
        self._inspect(row, is_validated=row.is_validated, is_non_finite=False)  # unknown until `_on_arrival`
        tensors = {n: r for n, r in readings.items() if isinstance(r, Tensor) and not sync.is_on_host(r)}
        known = {name: sync.to_array(reading) for name, reading in readings.items() if name not in tensors}
        # the cost of a row ends here: later work on the row is part of a later call
        device_s, cost = self._device_clock.collect(), self._meter.end_row(began)
        self._transfers.send(tensors, functools.partial(self._on_arrival, row, known, cost, device_s))

    def drain(self, *, wait: bool = False) -> None:
        """Complete the rows that the device has computed.

        Args:
            wait: Whether to wait for all rows in flight.
        """
        if self._transfers is not None:
            self._transfers.drain(wait=wait)

    @best_effort("the recording", is_final=True)
    def _on_arrival(
        self, row: PendingRow, known: Values, cost: RowCost, device_s: Callable[[], float], values: Values
    ) -> None:
        completed, step = row.complete({**known, **values}), row.builder.step
        loss = completed.run["loss"]  # the host did not see this loss, so its events are emitted here
        if math.isnan(loss) and "loss" in values:
            self._context.events.nan(step=step, is_given=True)
        if not math.isfinite(loss) and "finite" in values:
            self._context.events.batch(step=step, is_clean=bool(values["finite"].all()))
        if not self._is_finite(completed):
            self._inspect(row, is_validated=False, is_non_finite=True)
        self._feed(step, completed, cost, device_s=device_s())

    def _is_finite(self, row: StepRow) -> bool:
        norm = 0.0 if self._has_scaler else row.run.get("grad_norm.before_clip", 0.0)
        return math.isfinite(row.run.get("loss", 0.0)) and math.isfinite(norm)

    @best_effort("the inspection of autograd graph and modes")
    def _inspect(self, row: PendingRow, *, is_validated: bool, is_non_finite: bool) -> None:
        if (facts := self._context.facts) is not None:
            step = row.builder.step
            for event in facts.read(row.loss, step=step, is_validated=is_validated, is_non_finite=is_non_finite):
                self._context.pipeline.add_event(event)

    def _feed(self, step: int, row: StepRow, cost: RowCost, *, device_s: float) -> None:
        # host and device work at the same time, so the longer of the two delays the step
        watch_s = max(cost.host_s, device_s) + self._meter.pipeline_s()
        row.run["watch_ms"] = 1e3 * watch_s
        self._context.budget.charge(cost.wall_s, watch_s=watch_s, optional_s=cost.optional_s)
        self._context.pipeline.feed(
            step, run=row.run, param_SL=row.param_SL, act_SL=row.act_SA, histograms=row.histograms
        )
