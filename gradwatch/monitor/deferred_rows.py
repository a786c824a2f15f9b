"""The late way: rows that a GPU still computes are sent off as they are, and made whole where they arrive."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from gradwatch.monitor.best_effort import dispensable
from gradwatch.monitor.budget import Budget
from gradwatch.monitor.collector import Collector
from gradwatch.monitor.host_stats import num_samples
from gradwatch.monitor.one_time_events import Notes
from gradwatch.monitor.row import Left
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.batches.batch_hash import checksums, finite_flag, joined
from gradwatch.probe.device.transfer_queue import Post, Values
from gradwatch.probe.gradients.micro_batch import MicroBatchProbe
from gradwatch.probe.inspections import Facts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LateRow:
    """What the host knows of a row that the device has not computed yet.

    Args:
        step: Optimizer step.
        run: Statistics of the run that are known.
        calls: How many losses are averaged.
        leave: Makes the row, from what the device sent.
        told: The norm that clipping returned, where the host knows it.
        checksums: Of the batch, tensors for those that were sent.
        device_s: Tells the seconds that the device spent, once the row has arrived.
        host_s: Seconds that the host spent.
        optional_s: Those of them that went into sampled statistics.
        wall_s: Seconds since the row before.
        loss: The loss as the loop handed it over.
    """

    step: int
    run: dict[str, float]
    calls: int
    leave: Callable[[Values], Left]
    told: float | None
    checksums: Sequence[int | Tensor]
    device_s: Callable[[], float]
    host_s: float
    optional_s: float
    wall_s: float
    loss: Any

    def complete(self, values: Values) -> tuple[Left, dict[str, float]]:
        """Return the row and all statistics of the run, from what the device sent."""
        row = self.leave(values)
        run = self.run | row.run
        if "loss" in values:
            run["loss"] += float(values["loss"]) / self.calls
        if "micro" in values:
            run["grad_norm.micro"] = float(values["micro"]) / run["loss_scale"]
        if self.checksums:
            sent = iter(values.get("batch", np.zeros(0, np.int64)))
            run["batch_hash"] = float(joined([int(next(sent)) if isinstance(p, Tensor) else p for p in self.checksums]))
        told = float(values["told"]) if "told" in values else self.told
        run["grad_norm.before_clip"], run["grad_norm.after_clip"] = row.norms(told)
        return row, run


@final
class LateWay:
    """Sends rows off without waiting for the device, and feeds the pipeline with them, in their order.

    Arguments are parts of the monitor, whose steps these are.

    Args:
        pipeline: Where rows go.
        collector: What reads on the device.
        budget: Told of what rows took.
        notes: What is noted of losses and batches.
        facts: Probe of tape and modes, or None.
        note_facts: Notes what that sees at a step, given its loss.
        micro: Probe of micro-batches, or None.
        warned: What the monitor has warned of.
    """

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        collector: Collector,
        budget: Budget,
        notes: Notes,
        facts: Facts | None,
        note_facts: Callable[[Facts, Tensor | float | None], object],
        micro: MicroBatchProbe | None,
        warned: set[str],
    ) -> None:
        self._pipeline = pipeline
        self._collector = collector
        self._budget = budget
        self._notes = notes
        self._facts = facts
        self._note_facts = note_facts
        self._micro = micro
        self.warned = warned
        self._post = Post()
        self._busy_s = pipeline.cpu_s

    def __len__(self) -> int:
        """Return how many rows are under way."""
        return len(self._post)

    def deliver(self, *, wait: bool = False) -> None:
        """Take in the rows that the device has computed; all, where one waits for it."""
        self._post.deliver(wait=wait)

    def is_remote(self, tensor: Tensor) -> bool:
        """Say whether looking at a tensor would have to wait. On the CPU, where tests play a GPU, all of them."""
        return tensor.device == self._collector.device

    def send(
        self,
        step: int,
        *,
        run: dict[str, float],
        calls: int,
        losses: Tensor | None,
        loss: Tensor | float | None,
        batch: Any,
        grad_norm: Tensor | float | None,
        host_s: float,
        began: float,
        recorded: float,
    ) -> float:
        """Send a row off as it is, with what it takes to make it whole, and return the time at which that was done.

        Args:
            step: Optimizer step.
            run: Statistics of the run that are known.
            calls: How many losses are averaged.
            losses: Their sum, as far as the device has them.
            loss: The loss as the loop handed it over.
            batch: The step's inputs.
            grad_norm: As in `Monitor.step`.
            host_s: Seconds that the host spent on the row before this call of `Monitor.step`.
            began: When that call began.
            recorded: When the row before was sent.
        """
        collector = self._collector
        end = collector.clock.begin(collector.device)
        tensors = self._late_numbers(losses, grad_norm)
        parts = [] if batch is None or not collector.has_optimizers else checksums(batch)
        remote = [part for part in parts if isinstance(part, Tensor)]
        tensors |= {"batch": torch.stack(remote)} if remote else {}
        flag = None if self._notes.knows_batch else finite_flag(batch, collector.device)
        tensors |= {"finite": flag} if flag is not None else {}
        if batch is not None and (samples := num_samples(batch)) is not None:
            run["samples_per_s"] = 1e3 * samples / run["step_ms"]
        collector.read_updates()
        tensors |= collector.outgoing()
        end()
        if self._facts:
            run["grad_norm.before_clip"] = 0.0  # whether the step is spoilt is not known yet
            self._note_facts(self._facts, loss)
        told = None if grad_norm is None or isinstance(grad_norm, Tensor) else float(grad_norm)
        now = time.perf_counter()
        late = LateRow(
            step=step,
            run=run,
            calls=calls,
            leave=collector.leaver(),
            told=told,
            checksums=parts,
            device_s=collector.clock.take(),
            host_s=host_s + collector.watch_s + now - began,
            optional_s=collector.optional_s,
            wall_s=now - recorded,
            loss=loss,
        )
        self._post.send(tensors, functools.partial(self._arrive, late))
        return now

    def _late_numbers(self, losses: Tensor | None, grad_norm: Tensor | float | None) -> dict[str, Tensor]:
        """Return the numbers of the step that only the device has."""
        late = {"loss": losses, "told": grad_norm, "micro": self._micro.late if self._micro else None}
        return {name: value.detach() for name, value in late.items() if isinstance(value, Tensor)}

    @dispensable("the recording")
    def _arrive(self, late: LateRow, values: Values) -> None:
        """Make a row whole, and take it in."""
        row, run = late.complete(values)
        if math.isnan(run["loss"]) and "loss" in values:
            self._notes.nan(step=late.step, is_given=True)
        if not math.isfinite(run["loss"]) and "finite" in values:
            self._notes.batch(step=late.step, is_clean=bool(values["finite"].all()))
        if self._facts and not math.isfinite(run["loss"] + (0.0 if self._collector.has_scaler else row.norm)):
            self._note_spoilt(self._facts, late)
        busy_s = self._pipeline.cpu_s
        watch_s = max(late.host_s, late.device_s()) + busy_s - self._busy_s
        self._busy_s = busy_s
        run["watch_ms"] = 1e3 * watch_s
        self._budget.charge(late.wall_s, watch_s=watch_s, optional_s=late.optional_s)
        histograms = row.histograms(late.step)
        self._pipeline.feed(late.step, run=run, param_SL=row.row_SL, act_SL=row.act_SA, histograms=histograms)

    @dispensable("the look at tape and modes")
    def _note_spoilt(self, facts: Facts, late: LateRow) -> None:
        for event in facts.read(late.loss, step=late.step, is_validated=False, is_spoilt=True):
            self._pipeline.note(event)
