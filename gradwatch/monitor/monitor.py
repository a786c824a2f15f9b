"""The monitor of a training loop: one call per optimizer step makes one row of the history."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.history.disk.header import Status
from gradwatch.history.store import History
from gradwatch.incident.step_snapshot import StepSnapshotter
from gradwatch.monitor.best_effort import best_effort, warn_once
from gradwatch.monitor.budget import Budget, Schedule
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.full_path import FullPath
from gradwatch.monitor.one_time_events import OneTimeEvents
from gradwatch.monitor.overhead import OverheadMeter
from gradwatch.monitor.readings.collector import Collector
from gradwatch.monitor.row_queue import RowQueue
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.gradients.micro_batch import MicroBatchProbe
from gradwatch.probe.inspections import Inspections
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.own_loop.finding_handler import FindingStop


@final
class Monitor:
    """Watches a model in a training loop without changing the training.

    The loop calls `step()` once per optimizer step, after it. The optimizers' own hooks read the gradients, just before
    an update; a loop that clips calls `observe()` before it clips, or passes the norm that clipping returned to `step`.
    The layout of the row is fixed when the monitor is made: later parameters are not in it.

    No failure of the monitor stops the training: a feature that raises is disabled with one RuntimeWarning. Mistakes
    that the user can fix are raised, as `GradwatchError`.

    Args:
        params: The parameters to watch, in the order of `pipeline.history.info.layers`.
        optimizers: The optimizers that move them.
        pipeline: Where rows go.
        activations: Probe of the model's activation modules, or None.
        scaler: The loop's GradScaler, or None.
        schedule: When the sampled statistics are measured.
        accumulate: Up to this many calls of `step` are the micro-batches of one update, not skipped updates.
        facts: Inspects graph and modes, or None.
        hooked: Whether to follow the optimizers by their hooks. A loop that calls `observe` before each update, and
            passes the statistics `skipped`, `loss_scale`, learning rates and both norms to `step`, needs none.
        hooks: More hooks to remove with the monitor's own.
        keeper: Keeps the state before each step, or None; then each step waits for its findings.
        deferred: Whether rows are completed some steps later, when the device has computed them, so that no step waits
            for it. None chooses so if all parameters are on one GPU, there is no keeper, and there are hooks.
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
        hooks: Sequence[RemovableHandle] = (),
        keeper: StepSnapshotter | None = None,
        deferred: bool | None = None,
        stop: FindingStop | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._stop = stop
        self.run_dir = run_dir
        self.facts = facts
        self._is_closed = False
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
            is_deferred=is_on_one_gpu and hooked and keeper is None if deferred is None else deferred,
        )
        self.warned = context.warned
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
        self._append: Callable[[Any, Any, Any, Any, Any], bool | None] = _not_appended
        self._observe: Callable[[], float | None] = _not_observed
        if (fast_path := self._full_path.fast_path) is not None:
            pipeline.row_source = fast_path.gather
            self._append = fast_path.native.append
            if not hooked:
                self._observe = fast_path.native.observe
        self._full_path.begin(pipeline.next_step)

    @property
    def history(self) -> History:
        """All that was recorded; waits for the device."""
        self._rows.drain(wait=True)
        return self.pipeline.history

    @property
    def next_step(self) -> int:
        """The optimizer step in progress."""
        return self._full_path.next_step

    def observe(self, optimizer: Optimizer | None = None) -> float:
        """Measure the gradients as they are now, which must be those of the loss, and return their total L2 norm.

        The norm is NaN or Inf if a gradient holds NaN or Inf.

        Args:
            optimizer: The optimizer whose gradients to measure; by default, all optimizers that have not stepped yet.
        """
        norm = self._observe()
        if norm is None:
            self._collector.leave_fast_path()
            norm = self._collector.observe(optimizer)
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
        """Record one optimizer step, after it.

        If the step is a CUDA graph, warm it up and capture it while the monitor watches, and call this after every
        replay, outside of the capture: each replay computes the captured readings again. Weights and activations, which
        are sampled, are not read then.

        If no optimizer has stepped since the last call, the update was skipped. With accumulation, the call may also
        end a micro-batch: its loss is averaged with the losses of the other calls up to the update.

        Args:
            loss: Loss of the step.
            batch: The step's inputs, any nest of tensors: their hash identifies batches that repeat.
            val_loss: Validation loss, if it was just measured.
            grad_norm: Total norm that clipping returned, over all that is watched. The gradients were read after it,
                and their statistics are scaled back.
            statistics: Statistics of the run by their name in the catalogue; they override the monitor's own.

        Raises:
            FindingError: There is a new finding, and `watch` was called with `on_finding="raise"`.
        """
        is_appended = self._append(loss, batch, val_loss, grad_norm, statistics)
        if is_appended:
            return
        if self._stop:  # a new finding has ended the fast path, so this is soon after it
            self._stop.raise_finding()
        if is_appended is None:
            self._full_path.run_housekeeping()
            return
        began = time.perf_counter()
        if self._is_closed:
            warn_once(self, "close", "step() after close() records nothing")
            return
        self._collector.leave_fast_path()
        self._rows.drain()
        self._full_path.record(loss, batch, val_loss, grad_norm, statistics, began=began)

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings so far, in the order in which they were found."""
        return tuple(self.history.findings)

    def _repr_html_(self) -> str:
        """Return the summary that a notebook shows for the run so far."""
        from gradwatch.diagnose.rank import diagnose
        from gradwatch.render.terminal.summary import summary_html

        return summary_html(self.history, diagnose(self.history))

    def detach(self) -> None:
        """Remove all hooks from the model and the optimizers; `step` records nothing any more."""
        self._is_closed = True
        self._full_path.close()
        self._collector.detach()
        if self.facts:
            self.facts.close()
        for hook in self._hooks:
            hook.remove()

    def charge(self, seconds: float) -> None:
        """Charge the next row for time that was spent on watching elsewhere."""
        self._full_path.charge(seconds)

    def state(self) -> dict[str, Any]:
        """Return the state that further rows depend on, plain data and arrays."""
        return self._collector.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._collector.restore(state)

    def restart(self) -> None:
        """Continue with the step after the newest in the history, which was truncated."""
        self._rows.drain(wait=True)
        self._collector.leave_fast_path()
        self._full_path.begin(self.pipeline.next_step)

    def close(self, status: Status = "finished") -> tuple[Diagnosis, ...]:
        """Detach, end the run for sinks and disk, and return the diagnoses. A second call only returns them.

        Raises:
            FindingError: As in `step`, if the loop has finished.
        """
        if self._diagnoses is None:
            self.detach()
            self._flush()
            self._diagnoses = self._end(status) or ()
        if self._stop and status == "finished":  # a loop may end before the worker thread finds something
            self._stop.raise_finding()
        return self._diagnoses

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    @best_effort("the recording")
    def _flush(self) -> None:
        self._rows.drain(wait=True)
        self.pipeline.finish()

    @best_effort("the diagnosis")
    def _end(self, status: Status) -> tuple[Diagnosis, ...]:
        return self.pipeline.close(status)


def _not_appended(*_: object) -> bool | None:
    """Leave the step to the full path."""
    return False


def _not_observed() -> float | None:
    """Leave the gradients to the full path."""
    return None
