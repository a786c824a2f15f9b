"""Monitor a training loop: each optimizer step becomes one row of the history."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.diagnose.rank import diagnose
from gradwatch.history.ending import Status
from gradwatch.history.store import History
from gradwatch.incident.step_snapshot import StepSnapshotter
from gradwatch.monitor.best_effort import best_effort, warn_once
from gradwatch.monitor.budget import Budget, Schedule
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.full_path import FullPath
from gradwatch.monitor.one_time_events import OneTimeEvents
from gradwatch.monitor.overhead import OverheadMeter
from gradwatch.monitor.readings.collector import Collector
from gradwatch.monitor.readings.hand_updates import HandUpdates
from gradwatch.monitor.row_queue import RowQueue
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.gradients.micro_batch import MicroBatchProbe
from gradwatch.probe.inert_hook import Removable
from gradwatch.probe.inspections import Inspections
from gradwatch.probe.memory.out_of_memory import describe_out_of_memory, is_out_of_memory
from gradwatch.records import Diagnosis, Finding, Lines
from gradwatch.render.common.summary_lines import summary_text
from gradwatch.render.own_loop.finding_handler import FindingStop

FORKED = "a forked child process goes on with this monitor, which records only its parent; call watch() here"


@final
class Monitor:
    """Watches a model in a training loop without changing the training.

    The loop calls `step()` once after each optimizer step. Hooks of the optimizers read the gradients just before an
    update, or just before torch's functions clip them. A loop that clips by hand calls `observe()` before it clips, or
    passes the norm before clipping to `step`. Parameters that are added after construction are not watched.

    No failure of the monitor stops the training: a feature that raises several times in a row is disabled with one
    RuntimeWarning. Mistakes that the user can fix are raised as `GradwatchError`.

    Args:
        params: The parameters to watch, in the order of `pipeline.history.info.layers`.
        optimizers: The optimizers that update the parameters.
        pipeline: Receives the rows.
        activations: Probe of the model's activation modules, or None.
        scaler: The loop's GradScaler, or None.
        schedule: Steps between two measurements of the sampled statistics.
        accumulate: Up to this many calls of `step` are the micro-batches of one update, not skipped updates.
        facts: Inspects the autograd graph and the modes of modules, or None.
        hooked: Whether to hook the optimizers. A loop without hooks calls `observe` before each update. It also passes
            the statistics `skipped`, `loss_scale`, learning rates and both norms to `step`.
        hooks: Further hooks to remove with the hooks of the monitor.
        keeper: Keeps the state before each step, or None. With a keeper, each step waits for its findings.
        deferred: Whether rows are completed some steps later, so that no step waits for the device. None enables this
            if all parameters are on one GPU, there are hooks, and there is no keeper.
        stop: Raises a finding in `step`, or None.
        run_dir: The run directory; None if the history is only in memory.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        optimizers: Sequence[Optimizer],
        pipeline: Pipeline,
        activations: ActivationProbe | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        accumulate: int = 1,
        facts: Inspections | None = None,
        hooked: bool = True,
        hooks: Sequence[Removable] = (),
        keeper: StepSnapshotter | None = None,
        deferred: bool | None = None,
        stop: FindingStop | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._stop, self.run_dir, self.facts = stop, run_dir, facts
        self._is_closed = self._is_abandoned = False
        self._diagnoses: tuple[Diagnosis, ...] | None = None
        devices = {p.device for p in params}
        cuda = next((device for device in devices if device.type == "cuda"), None)
        is_on_one_gpu = cuda is not None and len(devices) == 1
        context = MonitorContext(
            pipeline=pipeline,
            budget=Budget(schedule),
            meter=OverheadMeter(lambda: pipeline.cpu_s),
            events=OneTimeEvents(pipeline.add_event),
            facts=facts,
            accumulate=accumulate,
            is_hooked=hooked,
            # one GPU: a transfer carries tensors of one device; a keeper needs the values of the step at its end
            is_deferred=is_on_one_gpu and hooked and keeper is None if deferred is None else deferred,
        )
        self.attempts = context.attempts
        micro_batch = MicroBatchProbe(params) if accumulate > 1 and len(optimizers) == 1 else None
        self._hooks = [*hooks, *(micro_batch.attach() if micro_batch else ())]
        collector = self._collector = Collector(
            params, context, optimizers=optimizers, activations=activations, scaler=scaler
        )
        collector.owner = self
        clock, has_scaler = collector.device_clock, collector.loss_scale.has_scaler
        self._rows = RowQueue(context, device_clock=clock, has_scaler=has_scaler)
        self._full_path = FullPath(
            context,
            collector=collector,
            rows=self._rows,
            micro_batch=micro_batch,
            keeper=keeper,
            memory_device=cuda,
        )
        # stubs instead of a branch in `step`: on the fast path, the bound native method is the whole call
        self._append: Callable[[Any, Any, Any, Any, Any], bool | None] = _not_appended
        self._observe: Callable[[], float | None] = _not_observed
        if (fast_path := self._full_path.fast_path) is not None:
            pipeline.row_source = fast_path.gather
            self._append = fast_path.native.append
            if not hooked:  # with hooks, the native hook reads the gradients
                self._observe = fast_path.native.observe
        if optimizers and isinstance(optimizers[0], HandUpdates):
            self._append = functools.partial(_end_by_hand, optimizers[0])
        self._full_path.begin(pipeline.next_step)

    @property
    def history(self) -> History:
        """All recorded data. Waits for the device and the worker thread."""
        self._rows.drain(wait=True)
        return self.pipeline.history

    @property
    def next_step(self) -> int:
        """The optimizer step in progress."""
        return self._full_path.next_step

    def observe(self, optimizer: Optimizer | None = None, *, needs_norm: bool = True) -> float:
        """Measure the present gradients and return their total L2 norm.

        Call it when the gradients are complete, before any clipping. The norm is NaN or Inf if a gradient contains NaN
        or Inf. If parameters are sharded over processes, the norm needs a collective, so all must make the call.

        Args:
            optimizer: The optimizer of the gradients; by default, all optimizers that have not stepped yet.
            needs_norm: Whether the norm is needed; if not, the call needs no collective, and may return nan.
        """
        norm = self._observe()
        if norm is None:
            self._collector.leave_fast_path()
            norm = self._collector.observe(optimizer, needs_norm=needs_norm)
        return norm

    def step(
        self,
        loss: Tensor | float | None,
        *,
        batch: Any = None,
        val_loss: Tensor | float | None = None,
        grad_norm: Tensor | float | None = None,
        statistics: Mapping[str, float] | None = None,
    ) -> None:
        """Record one optimizer step, after the step.

        If the step is a CUDA graph, warm it up and capture it after the monitor is attached. Then call this method
        after every replay, outside of the capture. Each replay computes the captured readings again. Weights and
        activations are sampled statistics, and are not read in this case.

        If no optimizer has stepped since the last call, the update was skipped. With accumulation, the call may also
        end a micro-batch. The losses of all calls up to the update are averaged.

        Args:
            loss: Loss of the step.
            batch: The step's inputs, any nest of tensors. Their hash identifies repeated batches.
            val_loss: Validation loss, if it was just measured.
            grad_norm: Total norm before clipping, over all watched parameters. It scales back the statistics of
                gradients that were read after clipping. Not needed with torch's clip functions, nor used with shards.
            statistics: Statistics of the run by their name in the catalogue. They override the values of the monitor.

        Raises:
            FindingError: There is a new finding, and `watch` was called with `on_finding="raise"`.
        """
        is_appended = self._append(loss, batch, val_loss, grad_norm, statistics)
        if is_appended:  # on the fast path, almost all steps end here
            return
        if self._stop:  # a new finding ends the fast path, so this point is reached soon after it
            self._stop.raise_finding()
        if is_appended is None:  # the row is written, and Python work is due
            self._full_path.run_housekeeping()
            return
        began = time.perf_counter()
        if self._is_closed:
            _refuse_step(self)
            return
        self._collector.leave_fast_path()
        self._rows.drain()  # earlier rows whose readings have arrived, without waiting
        self._full_path.record(loss, batch, val_loss, grad_norm, statistics, began=began)

    def abandon(self) -> None:
        """Leave the run to the parent process, in a forked child: record nothing from now on."""
        self.pipeline.abandon()
        self._append, self._observe = _not_appended, _not_observed
        self._is_closed, self._is_abandoned, self._diagnoses = True, True, ()

    def findings(self) -> Lines[Finding]:
        """Return the open findings, in the order of their detection. `history.withdrawn` has the others."""
        return Lines(self.history.findings)

    def __str__(self) -> str:
        return summary_text(self.history, diagnose(self.history), run_dir=self.run_dir)

    def _repr_html_(self) -> str:
        # called by notebooks only, so the renderer is imported here
        state = random.getstate()  # rich draws a number when it is imported
        from gradwatch.render.terminal.diagnosis import diagnosis_html

        html = diagnosis_html(self.history, diagnose(self.history))
        random.setstate(state)
        return html

    def detach(self) -> None:
        """Remove all hooks from the model and the optimizers. Later calls of `step` record nothing."""
        self._is_closed = True
        self._full_path.close()
        self._collector.detach()
        if self.facts:
            self.facts.close()
        for hook in self._hooks:
            hook.remove()

    def charge(self, seconds: float) -> None:
        """Charge the next row for overhead outside the monitor."""
        self._full_path.charge(seconds)

    def state(self) -> dict[str, Any]:
        """Return the state that later rows depend on, as plain data and arrays."""
        return self._collector.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._collector.restore(state)

    def restart(self) -> None:
        """Continue with the step after the newest step of a truncated history."""
        self._rows.drain(wait=True)
        self._collector.leave_fast_path()
        self._full_path.begin(self.pipeline.next_step)

    def close(self, status: Status = "finished") -> tuple[Diagnosis, ...]:
        """Detach, end the run for sinks and disk, and return the diagnoses. A second call only returns the diagnoses.

        Raises:
            FindingError: As in `step`, if the loop has finished.
        """
        if self._diagnoses is None:
            self.detach()  # first: it leaves the fast path, and no hook adds readings after it
            self._flush()
            self._diagnoses = self._end(status) or ()
        # a loop may end before the worker thread finds something; after an exception, that exception is raised
        if self._stop and status == "finished":
            self._stop.raise_finding()
        return self._diagnoses

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record_failure(self.pipeline, error)
        self.close("finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    @best_effort("the recording", is_final=True)
    def _flush(self) -> None:
        self._rows.drain(wait=True)
        for event in self.facts.finish() if self.facts else ():
            self.pipeline.add_event(event)
        self.pipeline.finish()

    @best_effort("the diagnosis", is_final=True)
    def _end(self, status: Status) -> tuple[Diagnosis, ...]:
        return self.pipeline.close(status)


@best_effort("the error that ends the training", is_final=True)
def record_failure(pipeline: Pipeline, error: BaseException | None) -> None:
    """Record that a training ends because an allocation failed, before its run is closed."""
    if error is not None and is_out_of_memory(error):
        pipeline.add_event(describe_out_of_memory(error).at(max(pipeline.next_step - 1, 0)))


def _refuse_step(monitor: Monitor) -> None:
    if monitor._is_abandoned:
        monitor._is_abandoned = False
        monitor.detach()
        warn_once(monitor.attempts.warned, "close", FORKED)
    # has no effect after the warning above
    warn_once(monitor.attempts.warned, "close", "step() after close() records nothing")


def _end_by_hand(optimizer: HandUpdates, *_: object) -> bool:
    optimizer.step()  # for its hooks, as if the loop had called it
    return False


def _not_appended(*_: object) -> bool | None:
    return False  # the full path has to record the step


def _not_observed() -> float | None:
    return None  # the full path has to read the gradients
