"""The monitor of a training loop: one call per optimizer step makes one row of the history."""

# L = parameter tensors, S = statistics

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.history.disk.header import Status
from gradwatch.history.store import Floats, History
from gradwatch.incident.step_snapshot import StepSnapshotter
from gradwatch.monitor.accumulation import Rhythm
from gradwatch.monitor.best_effort import dispensable, warn_once
from gradwatch.monitor.budget import Budget, Schedule
from gradwatch.monitor.collector import Collector
from gradwatch.monitor.deferred_rows import LateWay
from gradwatch.monitor.host_stats import num_samples, number, peak_memory
from gradwatch.monitor.one_time_events import Notes
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.batches.batch_hash import hash_batch, is_finite
from gradwatch.probe.batches.repeated_samples import Samples
from gradwatch.probe.gradients.micro_batch import MicroBatchProbe
from gradwatch.probe.inspections import Facts
from gradwatch.records import Diagnosis, Finding

MEMORY_EVERY_S = 1.0  # from one look at the peak memory to the next: after it, a step goes the long way, 0.3 ms


@final
class Monitor:
    """Watches a model in a training loop and changes nothing in it.

    The loop calls `step()` once per optimizer step, after it. The gradients are read by the optimizers' own hooks, just
    before an update; a loop that clips calls `observe()` before it clips, or hands `step` the norm that clipping
    returned. The row's layout is fixed when the monitor is made: parameters that come later are not in it.

    No mistake of the monitor's stops the training: what raised is named in one RuntimeWarning and left out from then
    on. What the user can mend is raised, as `GradwatchError`.

    Args:
        params: The parameters to watch, in the order of `pipeline.history.info.layers`.
        optimizers: The optimizers that move them.
        pipeline: Where rows go.
        activations: Probe of the model's activation modules, or None.
        scaler: The loop's GradScaler, or None.
        schedule: When the sampled statistics are measured.
        accumulate: Up to so many calls of `step` are the micro-batches of one update, rather than skipped updates.
        measure_clipped: Whether to read gradients that were observed once more before their update, for their norm
            after clipping, in a loop that does not tell it.
        facts: Probe of tape and modes, or None.
        hooked: Whether to follow the optimizers by their hooks. A loop that calls `observe` before each update, and
            hands `step` the statistics `skipped`, `loss_scale`, learning rates and both norms, needs none.
        hooks: Further hooks to take off with the monitor's own.
        keeper: Keeps what each step began with, or None; then findings are waited for at every step.
        late: Whether rows are taken in once the device has computed them, some steps later, and no step waits for it.
            None for so where that helps: where all parameters are on one GPU, and neither a keeper nor a loop without
            hooks wants to know at once.
        run_dir: The run directory, or None where the history is in memory alone.
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
        measure_clipped: bool = False,
        facts: Facts | None = None,
        hooked: bool = True,
        hooks: Sequence[RemovableHandle] = (),
        keeper: StepSnapshotter | None = None,
        late: bool | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.run_dir = run_dir
        devices = {p.device for p in params}
        is_on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
        is_late = is_on_one_gpu and hooked and keeper is None if late is None else late
        self.warned: set[str] = set()
        self._budget = Budget(schedule)
        self._collector = Collector(
            params,
            optimizers=optimizers,
            activations=activations,
            scaler=scaler,
            budget=self._budget,
            measure_clipped=measure_clipped,
            hooked=hooked,
            late=is_late,
        )
        self._is_hooked = hooked
        self._rhythm = Rhythm(accumulate)
        is_split = accumulate > 1 and len(optimizers) == 1
        self._micro = MicroBatchProbe(params, accumulate, is_late=is_late) if is_split else None
        self._cuda = next((p.device for p in params if p.device.type == "cuda"), None)
        self._memory, self._looked = math.nan, -math.inf
        self._facts = facts
        self._samples = Samples()
        self._hooks = [*hooks, *(self._micro.attach() if self._micro else ())]
        self._keeper = keeper
        self._is_closed = False
        self._notes = Notes(pipeline.note)
        self._found = pipeline.findings
        self._num_findings = len(self._found)
        self._step, self._updates = 0, 0  # the one under way, and updates of those that are over
        self._fed_s, self._busy_s, self._ended = 0.0, pipeline.cpu_s, 0.0
        self._waited_s = 0.0  # in the newest row for those before, whose time counts as the pipeline's
        self._run: dict[str, float] = {}
        is_plain = keeper is None and self._micro is None and pipeline.history.groups == self._collector.num_groups
        self._plain = self._collector.plain if is_plain else None
        self._record = _not_plain if self._plain is None else self._plain.native.record
        self._observe = _not_seen if self._plain is None or hooked else self._plain.native.observe
        self._is_ahead = False  # of what this knows, plain steps are
        if self._plain is not None:
            pipeline.row_source = self._plain.gather
        self._late = self._late_way() if is_late else None
        self._begin(pipeline.next_step)
        self._recorded = self._ended
        self._go_plainly()

    @property
    def history(self) -> History:
        """All that was recorded; waits for the device."""
        self._deliver(wait=True)
        return self.pipeline.history

    @property
    def next_step(self) -> int:
        """The optimizer step that is under way."""
        return self._plain.native.step if self._plain is not None and self._is_ahead else self._step

    def observe(self, optimizer: Optimizer | None = None) -> float:
        """Measure the gradients as they are now, which must be those of the loss, and return their total L2 norm.

        The norm is NaN or Inf where a gradient holds NaN or Inf.

        Args:
            optimizer: Whose gradients; where none is named, those of all optimizers that have not stepped yet.
        """
        norm = self._observe()
        if norm is None:
            self._catch_up()
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

        Where the step is a CUDA graph, warm up and capture it while the monitor watches, and call this after every
        replay, outside of the capture: what the captured hooks read is computed anew by each replay. Weights and
        activations, which are sampled, are not read then; a watched optimizer tells updates all the same.

        Where no optimizer has stepped since the last call, the update was skipped; with accumulation, the call may also
        end a micro-batch: then its loss is averaged with those of the calls up to the update.

        Args:
            loss: Loss of the step.
            batch: The step's inputs, any nest of tensors: their hash tells batches that repeat.
            val_loss: Validation loss, where it was just measured.
            grad_norm: Total norm that clipping returned, over all that is watched. The gradients were read after it,
                and their statistics are scaled back.
            statistics: Statistics of the run by their name in the catalogue; they override the monitor's own.
        """
        is_recorded = self._record(loss, batch, val_loss, grad_norm, statistics)
        if is_recorded:
            return
        if is_recorded is None:
            self._take_turn()
            return
        began = time.perf_counter()
        if self._is_closed:
            warn_once(self, "close", "step() after close() records nothing")
            return
        self._catch_up()
        collector, run = self._collector, self._run
        self._deliver()
        if self._is_hooked:
            if not self._find_out(loss, val_loss, grad_norm, is_complete=bool(statistics)):
                return
            run["step_ms"] = 1e3 * (began - self._ended)
        if statistics:
            run.update(statistics)
        if not self._is_hooked:
            collector.conclude(updated=not run["skipped"])
        run["peak_memory_bytes"] = self._peak_memory()
        if self._late is not None:
            self._send(self._late, loss, batch, grad_norm, began)
            return
        if batch is not None and collector.has_optimizers:
            self._describe_batch(batch)
            self._compare_batch(batch)
        collector.read_updates()
        act_SA = collector.read_activations()
        if self._facts:
            self._note_facts(self._facts, loss)
        self._pass_on(act_SA, began)

    def _go_plainly(self) -> None:
        """Record steps natively from the one under way on, as long as nothing is due."""
        if self._plain is None or self._is_closed or not self._rhythm.is_even:
            return
        step, facts = self._step, self._facts
        until = min(self._budget.next_due(step), self._budget.next_review + 1)
        if step >= until:
            return
        native = self._plain.native
        native.memory, native.carried_s = self._peak_memory(), self._fed_s
        native.ended, native.recorded = self._ended, self._recorded
        glance = None if facts is None or facts.is_over(step) else facts.pass_by
        self._plain.arm(step, until=until, found=self._found, glance=glance, deadline=self._ended + MEMORY_EVERY_S)
        self._collector.go_plainly()
        self._is_ahead = True

    def _catch_up(self) -> None:
        """Go on by the long way from where plain steps have come to."""
        if self._plain is None or not self._is_ahead:
            return
        native, self._is_ahead = self._plain.native, False
        self._updates += native.step - self._step
        self._collector.leave_plain_steps()
        self._plain.charge(self._budget)
        self._step, self._ended, self._recorded = native.step, native.ended, native.recorded
        self._fed_s = native.carried_s

    def _take_turn(self) -> None:
        """Do between plain steps what Python has to do at times, and go on."""
        self._catch_up()
        began, busy_s = self._ended, self.pipeline.cpu_s
        self._pull()
        self._adapt(self._step - 1)
        self._begin(self._step)
        self._fed_s += self._ended - began + busy_s - self._busy_s
        self._busy_s = busy_s
        self._go_plainly()

    def _pass_on(self, act_SA: Floats | None, began: float) -> None:
        """Send the row off that is made, and make ready for the next."""
        collector = self._collector
        fed = time.perf_counter()
        busy_s = self.pipeline.cpu_s
        watch_s = self._fed_s + collector.watch_s + fed - began + busy_s - self._busy_s
        self._run["watch_ms"] = 1e3 * watch_s
        self._budget.charge(fed - self._recorded, watch_s=watch_s, optional_s=collector.optional_s)
        self._recorded, self._busy_s = fed, busy_s
        self._feed(act_SA)
        if self._keeper:
            self._conclude(self._keeper)
        self._adapt(self._step)
        self._begin(self._step + 1)
        self._fed_s = self._ended - fed - self._waited_s  # charged to the next step
        self._go_plainly()

    def findings(self) -> tuple[Finding, ...]:
        """Return all that was found so far, in the order of its finding."""
        return tuple(self.history.findings)

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the run so far."""
        from gradwatch.diagnose.rank import diagnose
        from gradwatch.render.notebook.card import card

        return card(self.history, diagnose(self.history))

    def detach(self) -> None:
        """Take every hook off the model and the optimizers; `step` records nothing more."""
        self._catch_up()
        self._is_closed = True
        self._collector.detach()
        if self._facts:
            self._facts.close()
        for hook in self._hooks:
            hook.remove()

    def charge(self, seconds: float) -> None:
        """Count time that was spent for watching elsewhere, since the last step."""
        if self._plain is not None and self._is_ahead:
            self._plain.native.carried_s += seconds
        else:
            self._fed_s += seconds

    def state(self) -> dict[str, Any]:
        """Return what further rows depend on, plain data and arrays."""
        return self._collector.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._collector.restore(state)

    def restart(self) -> None:
        """Make ready for the step after the newest in the history, which has gone back."""
        self._deliver(wait=True)
        self._catch_up()
        self._begin(self.pipeline.next_step)
        self._go_plainly()

    def close(self, status: Status = "finished") -> tuple[Diagnosis, ...]:
        """Detach, end the run for sinks and disk, and return the diagnoses."""
        self.detach()
        self._settle()
        return self._end(status) or ()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _begin(self, step: int) -> None:
        self._run = {}
        self._rhythm.calls = 0
        self._losses: Tensor | None = None  # their sum, as far as the device has them
        self._step = step
        self._updates += self._collector.is_updated
        self._collector.begin(step)
        if self._micro:
            self._micro.begin(is_due=self._collector.is_due, scale=self._collector.scale)
        self._ended = time.perf_counter()

    def _is_between_updates(self, is_updated: bool) -> bool:
        """Say whether a call of `step` ends a micro-batch whose update is still to come."""
        if not self._collector.has_scaler:
            self._rhythm.learn(is_updated=is_updated)
        return not (is_updated or self._rhythm.is_full or self._collector.scale_fell())

    def _find_out(
        self,
        loss: Tensor | float | None,
        val_loss: Tensor | float | None,
        grad_norm: Tensor | float | None,
        *,
        is_complete: bool,
    ) -> bool:
        """Put together what the hooks saw since the last row, and say whether it makes one."""
        collector, run = self._collector, self._run
        self._rhythm.calls += 1
        self._add_losses(loss, val_loss)
        is_updated = collector.is_updated or not collector.has_optimizers
        is_steady = is_updated and self._rhythm.is_even  # an update at each call, as ever
        if not is_steady and not is_complete and self._is_between_updates(is_updated):
            return False
        if not is_updated:
            collector.describe_skipped()
        run.update(collector.optimizer)
        if self._micro:
            run["grad_norm.micro"] = self._micro.norm
        run["skipped"] = float(not is_updated)
        if self._late is None:
            run["grad_norm.before_clip"], run["grad_norm.after_clip"] = collector.norms(grad_norm)
        return True

    def _adapt(self, step: int) -> None:
        """Measure what is optional as often as the budget and the newest findings have it, after a step."""
        budget, num_findings = self._budget, len(self._found)
        if num_findings != self._num_findings:
            self._num_findings = num_findings
            budget.look_closer(step)
        if budget.review(step):
            self._notes.thinned(budget.factor, step=step, budget=budget.schedule.budget)

    @dispensable("the loss")
    def _add_losses(self, loss: Tensor | float | None, val_loss: Tensor | float | None) -> None:
        """Average the losses of the calls since the last row."""
        if self._late is not None and isinstance(loss, Tensor) and self._late.is_remote(loss):
            mean = loss.detach().float().mean()
            self._losses = mean if self._losses is None else self._losses + mean
            value = 0.0  # until it is known
        else:
            value = number(loss)
        if value != value:  # in the row, a loss that was not given looks like one that is NaN
            self._notes.nan(step=self._step, is_given=loss is not None)
        before = self._run.get("loss", 0.0)
        calls = self._rhythm.calls
        self._run["loss"] = (before * (calls - 1) + value) / calls
        if val_loss is not None:
            self._run["val_loss"] = value = number(val_loss)
            if self._is_hooked:  # a loop of ours does not evaluate twice
                updates = self._updates + self._collector.is_updated
                self._notes.validation(value, step=self._step, updates=updates)

    @dispensable("the look at tape and modes")
    def _note_facts(self, facts: Facts, loss: Tensor | float | None) -> None:
        norm = 0.0 if self._collector.has_scaler else self._run["grad_norm.before_clip"]  # scalers overflow by design
        is_spoilt = not (math.isfinite(self._run.get("loss", 0.0)) and math.isfinite(norm))
        is_validated = "val_loss" in self._run
        for event in facts.read(loss, step=self._step, is_validated=is_validated, is_spoilt=is_spoilt):
            self.pipeline.note(event)

    def _late_way(self) -> LateWay:
        """Return what sends rows off without waiting for the device."""
        return LateWay(
            pipeline=self.pipeline,
            collector=self._collector,
            budget=self._budget,
            notes=self._notes,
            facts=self._facts,
            note_facts=self._note_facts,
            micro=self._micro,
            warned=self.warned,
        )

    def _deliver(self, *, wait: bool = False) -> None:
        """Take in the rows that the device has computed."""
        if self._late is not None:
            self._late.deliver(wait=wait)

    @dispensable("the recording")
    def _send(
        self, late: LateWay, loss: Tensor | float | None, batch: Any, grad_norm: Tensor | float | None, began: float
    ) -> None:
        """Send the row off as it is, and make ready for the next."""
        self._recorded = late.send(
            self._step,
            run=self._run,
            calls=self._rhythm.calls,
            losses=self._losses,
            loss=loss,
            batch=batch,
            grad_norm=grad_norm,
            host_s=self._fed_s,
            began=began,
            recorded=self._recorded,
        )
        fed = time.perf_counter()
        self._adapt(self._step)
        self._begin(self._step + 1)
        self._fed_s = self._ended - fed

    @dispensable("the batch hash")
    def _describe_batch(self, batch: Any) -> None:
        run = self._run
        run["batch_hash"] = float(hash_batch(batch))
        if not math.isfinite(run.get("loss", 0.0)) and not self._notes.knows_batch:
            self._notes.batch(step=self._step, is_clean=is_finite(batch))
        if "samples_per_s" not in run and (samples := num_samples(batch)) is not None:
            run["samples_per_s"] = 1e3 * samples / run["step_ms"]

    @dispensable("the look at samples")
    def _compare_batch(self, batch: Any) -> None:
        for event in self._samples.look(batch, step=self._step):
            self.pipeline.note(event)

    def _peak_memory(self) -> float:
        """Return the peak memory as it was at the last look."""
        if self._ended - self._looked >= MEMORY_EVERY_S:
            self._looked = self._ended
            self._look_at_memory()
        return self._memory

    @dispensable("the peak memory")
    def _look_at_memory(self) -> None:
        self._memory = peak_memory(self._cuda)

    @dispensable("the recording")
    def _feed(self, act_SA: Floats | None) -> None:
        histograms = self._collector.histograms(self._step)
        row_SL = self._collector.row_SL
        self.pipeline.feed(self._step, run=self._run, param_SL=row_SL, act_SL=act_SA, histograms=histograms)

    @dispensable("the recording")
    def _pull(self) -> None:
        self.pipeline.pull()

    @dispensable("the recorder of incidents")
    def _conclude(self, keeper: StepSnapshotter) -> None:
        began = time.perf_counter()
        self.pipeline.finish()
        self._waited_s = time.perf_counter() - began
        if event := keeper.conclude(self._step, self.pipeline.unhandled_findings):
            self.pipeline.note(event)

    @dispensable("the recording")
    def _settle(self) -> None:
        self._deliver(wait=True)
        self.pipeline.finish()

    @dispensable("the diagnosis")
    def _end(self, status: Status) -> tuple[Diagnosis, ...]:
        return self.pipeline.close(status)


def _not_plain(*_: object) -> bool | None:
    """Record nothing, and say so."""
    return False


def _not_seen() -> float | None:
    """Read nothing, and say so."""
    return None
