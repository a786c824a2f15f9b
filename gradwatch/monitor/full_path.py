"""Record any step in Python, and enter the fast path again when possible: the full path."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.incident.step_snapshot import StepSnapshotter
from gradwatch.monitor.accumulation import AccumulationTracker
from gradwatch.monitor.best_effort import best_effort
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.fast_path import FastPath
from gradwatch.monitor.host_stats import MEMORY_INTERVAL_S, LossAverage, PeakMemory, to_number
from gradwatch.monitor.readings.batch_reader import BatchReader
from gradwatch.monitor.readings.collector import Collector
from gradwatch.monitor.readings.memory_watch import MemoryWatch
from gradwatch.monitor.row import PendingRow
from gradwatch.monitor.row_queue import RowQueue
from gradwatch.probe.gradients.micro_batch import MicroBatchProbe


@final
class FullPath:
    """Records steps of any kind in Python, and enters the fast path for the steps that it supports.

    Args:
        context: Shared by the parts of the monitor.
        collector: Reads on the device.
        rows: Completes the rows.
        micro_batch: Probe of micro-batches, or None.
        keeper: Keeps the state before each step, or None. With a keeper, each step waits for its findings.
        memory_device: CUDA device for the peak memory, or None for the host.
    """

    def __init__(
        self,
        context: MonitorContext,
        *,
        collector: Collector,
        rows: RowQueue,
        micro_batch: MicroBatchProbe | None,
        keeper: StepSnapshotter | None,
        memory_device: torch.device | None,
    ) -> None:
        self.attempts = context.attempts
        self._context, self._collector, self._rows = context, collector, rows
        self._pipeline, self._budget = context.pipeline, context.budget
        self._counter, self._meter, self._events = context.counter, context.meter, context.events
        self._micro_batch, self._keeper = micro_batch, keeper
        self._accumulation = AccumulationTracker(context.accumulate)
        watch = MemoryWatch(
            memory_device,
            total_steps=context.pipeline.history.info.total_steps,
            known=context.pipeline.history.events,
            emit=context.pipeline.add_event,
            attempts=context.attempts,
        )
        self._memory = PeakMemory(memory_device, context.attempts, lambda: watch.read(self._counter.step))
        self._losses = LossAverage(collector.device if context.is_deferred else None)
        self._batches = BatchReader(collector.device, context)
        self._num_findings = len(context.pipeline.findings)
        # a keeper waits for the findings of each step, and a micro-batch probe works in Python; native rows have one
        # learning rate per group of the optimizer, so the history must have the same columns
        is_fast = keeper is None and micro_batch is None and self._pipeline.history.groups == collector.num_groups
        self.fast_path: FastPath | None = collector.fast_path if is_fast else None

    @property
    def next_step(self) -> int:
        """The optimizer step in progress."""
        if self.fast_path is not None and self.fast_path.is_active:
            return self.fast_path.native.step
        return self._counter.step

    def begin(self, step: int) -> None:
        """Start the row of a step, and enter the fast path if possible."""
        self._begin(step)
        self.enter_fast_path()

    def record(
        self,
        loss: Tensor | float | None,
        batch: Any,
        val_loss: Tensor | float | None,
        grad_norm: Tensor | float | None,
        statistics: Mapping[str, float] | None,
        *,
        began: float,
    ) -> None:
        """Record a step, unless the call only ends a micro-batch.

        Args:
            loss: As in `Monitor.step`.
            batch: As in `Monitor.step`.
            val_loss: As in `Monitor.step`.
            grad_norm: As in `Monitor.step`.
            statistics: As in `Monitor.step`.
            began: Clock at which `Monitor.step` was called.
        """
        if not self._context.is_hooked:
            assert statistics is not None, "a loop without hooks passes statistics"
            self._collector.conclude(updated=not statistics["skipped"])
        elif not self._collect_step(loss, val_loss, is_complete=bool(statistics)):
            return  # a micro-batch: its update is still to come
        else:
            self._run["step_ms"] = 1e3 * (began - self._meter.step_began)
        given = {**(statistics or {}), "peak_memory_bytes": self._memory.at(self._meter.step_began)}
        self._submit(given, loss, batch, grad_norm, began)
        waited_s = self._conclude_snapshot(self._keeper, batch) if self._keeper else 0.0
        # before `_begin`, which asks the budget for the statistics that are due
        self._adjust_schedule(self._counter.step)
        self._begin(self._counter.step + 1)
        self._meter.carry_over(waited_s or 0.0)
        self.enter_fast_path()

    def enter_fast_path(self) -> None:
        """Enter the fast path until the next due step, if every call so far followed an update."""
        if self.fast_path is None or not self._accumulation.is_one_step_per_call:
            return  # native code counts each call as one update
        step, facts = self._counter.step, self._context.facts
        # a review belongs to the end of its step, so the step after it is the first on the full path
        until = min(self._budget.next_due(step), self._budget.next_review + 1)
        if step >= until:  # the step in progress itself is due
            return
        native = self.fast_path.native
        native.peak_memory = self._memory.at(self._meter.step_began)
        self._meter.hand_over(native)
        self.fast_path.enter(
            step,
            until=until,
            findings=self._pipeline.findings,
            skip_step=None if facts is None or facts.is_over(step) else facts.skip_step,
            deadline=self._meter.step_began + MEMORY_INTERVAL_S,
        )

    def close(self) -> None:
        """Leave the fast path, and never enter it again."""
        self._collector.leave_fast_path()
        self.fast_path = None

    def run_housekeeping(self) -> None:
        """Do the periodic Python work between two steps of the fast path, then enter it again."""
        self._collector.leave_fast_path()
        meter, began = self._meter, self._meter.step_began
        self._pull()  # before a new block replaces the rows that the worker has not read yet
        self._adjust_schedule(self._counter.step - 1)
        self._begin(self._counter.step)
        meter.carried_s += meter.step_began - began + meter.pipeline_s()  # no row ends here to charge them to
        self.enter_fast_path()

    def charge(self, seconds: float) -> None:
        """Charge the next row for overhead outside the monitor."""
        if self.fast_path is not None and self.fast_path.is_active:
            self.fast_path.native.carried_s += seconds
        else:
            self._meter.carried_s += seconds

    def _begin(self, step: int) -> None:
        self._run: dict[str, float] = {}
        self._accumulation.calls = 0
        self._losses.begin()
        self._counter.step = step
        self._counter.updates += self._collector.is_updated
        self._collector.begin()
        if self._micro_batch:
            self._micro_batch.begin(is_due=self._collector.is_due)
        self._meter.begin_step()

    def _collect_step(self, loss: Tensor | float | None, val_loss: Tensor | float | None, *, is_complete: bool) -> bool:
        """Collect the readings of the hooks since the last row. Return whether a row is complete."""
        collector, run = self._collector, self._run
        self._accumulation.calls += 1
        self._add_losses(loss, val_loss)
        is_updated = collector.is_updated or not collector.has_optimizers  # without optimizers, each call is a step
        is_usual = is_updated and self._accumulation.is_one_step_per_call
        # statistics in the call declare a whole step
        if not is_usual and not is_complete and self._is_between_updates(is_updated):
            return False
        if not is_updated:
            collector.read_skipped()
        run.update(collector.updates.settings)
        run["skipped"] = float(not is_updated)
        return True

    def _is_between_updates(self, is_updated: bool) -> bool:
        """Return whether a call of `step` ends a micro-batch before its update."""
        loss_scale = self._collector.loss_scale
        if not loss_scale.has_scaler:  # a scaler skips updates, which look like accumulation
            self._accumulation.learn(is_updated=is_updated)
        return not (is_updated or self._accumulation.is_full or loss_scale.has_fallen())

    @best_effort("the loss")
    def _add_losses(self, loss: Tensor | float | None, val_loss: Tensor | float | None) -> None:
        value = self._losses.add(loss, calls=self._accumulation.calls)
        self._run["loss"] = self._losses.mean
        if value != value:  # nan: in the row, a missing loss looks like a loss of NaN
            self._events.nan(step=self._counter.step, is_given=loss is not None)
        if val_loss is not None:
            self._run["val_loss"] = to_number(val_loss)

    def _submit(
        self,
        given: dict[str, float],
        loss: Tensor | float | None,
        batch: Any,
        grad_norm: Tensor | float | None,
        began: float,
    ) -> None:
        """Collect the readings of the row and submit it."""
        end = self._collector.device_clock.begin()
        inputs = self._batches.read(
            batch if self._collector.has_optimizers else None, step=self._counter.step, run={**self._run, **given}
        )
        device_readings, builder = self._collector.finish()
        readings = {**inputs.readings, **device_readings}
        if self._losses.remote_sum is not None:
            readings["loss"] = self._losses.remote_sum
        if self._micro_batch and self._micro_batch.norm is not None:
            readings["micro"] = self._micro_batch.norm
        given_norm = None
        if self._collector.is_sharded:
            grad_norm = None  # of whole gradients, which say nothing about the parts on this process
        # no step waits for a norm on the device of deferred rows: it joins the readings
        if isinstance(grad_norm, Tensor) and self._losses.is_remote(grad_norm):
            readings["given_norm"] = grad_norm.detach()
        elif grad_norm is not None:
            given_norm = self._number_of(grad_norm)
        # a norm that cannot be read leaves unknown whether the gradients were clipped
        is_norm_known = grad_norm is None or given_norm is not None or "given_norm" in readings
        end()
        row = PendingRow(
            builder=builder,
            run=self._run,
            given={**given, **inputs.run},
            calls=self._accumulation.calls,
            accumulate=self._context.accumulate,
            has_norms=self._context.is_hooked and is_norm_known,
            given_norm=given_norm,
            checksums=inputs.checksums,
            loss=loss,
        )
        self._rows.submit(row, readings, began=began)

    @best_effort("the norm of the gradients")
    def _number_of(self, grad_norm: Tensor | float) -> float:
        return to_number(grad_norm)

    def _adjust_schedule(self, step: int) -> None:
        """Adjust the sampling rate to the budget and to new findings, after a step."""
        budget, num_findings = self._budget, len(self._pipeline.findings)
        if num_findings != self._num_findings:
            self._num_findings = num_findings
            budget.watch_closely(step)
        if budget.review(step):
            self._events.thinned(budget.factor, step=step, budget=budget.schedule.budget)

    @best_effort("the recording", is_final=True)
    def _pull(self) -> None:
        self._pipeline.pull()

    @best_effort("the recorder of incidents")
    def _conclude_snapshot(self, keeper: StepSnapshotter, batch: Any) -> float:
        """Wait for the findings of the step, let the keeper act on them, and return the seconds spent waiting."""
        began = time.perf_counter()
        self._pipeline.finish()
        waited_s = time.perf_counter() - began
        news, calls = self._pipeline.unhandled_findings, self._accumulation.calls
        if event := keeper.conclude(self._counter.step, news, batch=batch, micro_batches=calls):
            self._pipeline.add_event(event)
        return waited_s
