"""Collect the readings of a row on the device: hooks read gradients, weights and activations."""

# S = statistics, A = activation modules

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.monitor.best_effort import best_effort
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.fast_path import FastPath, Hook
from gradwatch.monitor.readings.clip_reader import ClipReader
from gradwatch.monitor.readings.hand_updates import HandUpdates
from gradwatch.monitor.readings.loss_scale import LossScaleReader
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker, split_by_optimizer
from gradwatch.monitor.readings.update_reader import MAX_UPDATES, UpdateReader
from gradwatch.monitor.row import RowBuilder
from gradwatch.probe.activations.bitmask import UnitMask
from gradwatch.probe.activations.probe import ACTIVATIONS, ActivationProbe
from gradwatch.probe.activations.silent_units import SilentUnits
from gradwatch.probe.device.transfer_queue import DeviceClock
from gradwatch.probe.gradients import clip_calls


@final
class Collector:
    """Collects the readings of the device between two rows.

    Args:
        params: The parameters to watch, in the order of the columns.
        optimizers: The optimizers that update the parameters.
        activations: Probe of the activation modules, or None.
        scaler: The GradScaler of the loop, or None.
        context: Shared by the parts of the monitor.

    Attributes:
        device: Device of the first parameter.
        device_clock: Measures the time that the device spends.
        fast_path: Records most steps natively; None if it supports no step.
        loss_scale: Reads the GradScaler of the loop.
        updates: Reads gradients and settings around updates.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        context: MonitorContext,
        *,
        optimizers: Sequence[Optimizer],
        activations: ActivationProbe | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.attempts = context.attempts
        self.device = params[0].device if params else torch.device("cpu")
        # rows that are not deferred wait for the device, so the clock of the host counts that time already
        self.device_clock = DeviceClock(self.device if context.is_deferred else torch.device("cpu"))
        self.loss_scale = LossScaleReader(scaler)
        self.updates = UpdateReader(params, context, loss_scale=self.loss_scale, device_clock=self.device_clock)
        self.fast_path: FastPath | None = None
        self._num_layers, self._activations, self._silence = len(params), activations, SilentUnits()
        self.owner: object = None
        """The monitor. The hooks keep the collector alive, and thus the monitor, as long as the model."""
        self._context, self._meter, self._counter = context, context.meter, context.counter
        self._trackers = split_by_optimizer(params, optimizers)
        self._handles: list[RemovableHandle] = []
        is_supported = not context.is_deferred and not self.loss_scale.has_scaler
        for tracker in self._trackers:
            self._attach(tracker, has_fast_path=is_supported and not tracker.is_by_hand)
        self._clip_reader = ClipReader(
            self._trackers,
            self.updates,
            fast_path=self.fast_path,
            leave_fast_path=self.leave_fast_path,
            loss_scale=self.loss_scale,
            meter=context.meter,
        )
        if context.is_hooked:
            clip_calls.listen(self._clip_reader)

    def _attach(self, tracker: OptimizerTracker, *, has_fast_path: bool) -> None:
        before, after = _hook(self._before_update, tracker), _hook(self._after_update, tracker)
        if has_fast_path and len(self._trackers) == 1:  # native code reads whole rows, of one optimizer
            self.fast_path = tracker.fast_path(before=before, after=after)
        if not self._context.is_hooked:
            return
        if isinstance(tracker.optimizer, HandUpdates):
            self._handles += tracker.optimizer.after_backward(lambda: before(tracker.optimizer, (), {}))
            self._handles.append(tracker.optimizer.register_step_pre_hook(tracker.mark_updated))
            return
        if self.fast_path is not None:
            before, after = self.fast_path.native.before, self.fast_path.native.after
        self._handles.append(tracker.optimizer.register_step_pre_hook(before))
        self._handles.append(tracker.optimizer.register_step_post_hook(after))
        if len(self._trackers) > 1:  # between `observe` and a step, another optimizer's loss may add to the gradients
            self._handles += tracker.watch_backward()

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters are spread over processes. Each process reads its own parts."""
        return any(tracker.is_sharded for tracker in self._trackers)

    @property
    def has_optimizers(self) -> bool:
        """Return whether there is an optimizer to watch."""
        return bool(self._trackers)

    @property
    def num_groups(self) -> int:
        """Number of parameter groups when the monitor was attached."""
        return sum(tracker.rates.num_groups for tracker in self._trackers)

    @property
    def is_updated(self) -> bool:
        """Return whether an optimizer has updated its parameters since the row began."""
        return any(tracker.is_updated for tracker in self._trackers)

    @property
    def is_due(self) -> bool:
        """Return whether the statistics of updates are measured in this row."""
        return self.updates.due.updates

    def begin(self) -> None:
        """Start the row of the step in progress."""
        due = self.updates.due = self._context.budget.due(self._counter.step)
        self.updates.settings = {}
        self._meter.begin_row()
        self._clip_reader.begin()
        for tracker in self._trackers:
            tracker.begin(due.histograms)
            if tracker.is_by_hand and due.updates:  # no hook comes between the backward pass and the update
                self.updates.keep_weights(tracker)
        if self._activations and ACTIVATIONS in self.attempts.left_out:
            self._activations.close()
            self._activations = None
        if due.activations:
            self._arm_activations()
        if self._context.is_hooked:
            self.loss_scale.read()  # `has_fallen` compares with the scale at the beginning of the row

    def conclude(self, *, updated: bool) -> None:
        """Record whether a loop without hooks has updated the parameters with the observed gradients."""
        for tracker in self._trackers:
            tracker.is_updated = updated

    def observe(self, optimizer: Optimizer | None = None, *, needs_norm: bool = True) -> float:
        """Read the gradients of an optimizer, or of all that have not stepped yet, and return the total norm or nan."""
        began = time.perf_counter()
        if optimizer is None:
            trackers = [tracker for tracker in self._trackers if not tracker.is_updated] or self._trackers
        else:
            asked = (optimizer, getattr(optimizer, "optimizer", None))  # a wrapper holds the watched optimizer
            trackers = [tracker for tracker in self._trackers if tracker.optimizer in asked]
        norm = math.hypot(*[self.updates.observe(tracker, needs_norm=needs_norm) for tracker in trackers])
        if self.is_due and not self._context.is_hooked:  # no hook comes between this call and the update
            for tracker in trackers:
                self.updates.keep_weights(tracker)
        self._meter.hooks_s += time.perf_counter() - began
        return norm

    def read_skipped(self) -> None:
        """Read the gradients of an update that was skipped."""
        self.updates.read_skipped(self._trackers)

    def finish(self) -> tuple[dict[str, Tensor | NDArray[Any]], RowBuilder]:
        """Return the readings of the row, and a builder that completes the row from their values."""
        self.updates.read_updates(self._trackers)
        readings = {f"{i}.{name}": t for i, tracker in enumerate(self._trackers) for name, t in tracker.pending.items()}
        dead = None
        if self.updates.due.activations and self._activations:
            began = time.perf_counter()
            act, dead = self._read_activations() or ({}, None)
            readings |= act
            spent_s = self._activations.spent_s  # inside the forward calls
            self._meter.hooks_s += spent_s
            self._meter.optional_s += spent_s + time.perf_counter() - began
        if self.updates.due.activations and (facts := self._context.facts):
            self._meter.hooks_s += facts.policy.spent_s
            self._meter.optional_s += facts.policy.spent_s
            readings |= facts.policy.read()
        builder = RowBuilder(
            step=self._counter.step,
            num_layers=self._num_layers,
            optimizers=[tracker.columns for tracker in self._trackers],
            dead=dead,
            num_modules=len(self._activations.infos) if self._activations else 0,
            silence=self._silence,
        )
        return readings, builder

    def state(self) -> dict[str, Any]:
        """Return the state that later rows depend on: the steps since which units are silent, and the probe state."""
        return self._silence.state() | (self._activations.state() if self._activations else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`. The watched activations were set before the monitor was built."""
        self._silence.restore(state)
        if self._activations:
            self._activations.restore(state)

    def detach(self) -> None:
        """Remove all hooks from the model and the optimizers, and restore torch's clip functions."""
        self._clip_reader.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._activations:
            self._activations.close()

    def leave_fast_path(self) -> None:
        """Continue on the full path with the step in progress, if the fast path is active.

        Both hooks and calls of the loop leave the fast path through this method only.
        """
        if self.fast_path is None or not self.fast_path.is_active:
            return
        native, tracker = self.fast_path.native, self._trackers[0]
        begun = self.fast_path.leave()
        self._counter.updates += native.step - self._counter.step  # each step on the fast path is an update
        self._counter.step = native.step
        self._meter.take_back(native)
        self.fast_path.charge(self._context.budget)
        if begun is None:
            return
        tracker.pending["grad"] = begun.gradients_SL
        if begun.rates is None:
            tracker.is_observed = True
            tracker.clipping.resume(begun.factors_L, begun.versions)
        else:
            if begun.clipped_norm is not None:
                tracker.pending["clipped_norm"] = np.array([begun.clipped_norm])
            tracker.is_updated = self._context.is_hooked  # else `conclude` sets it
            # there is no scaler on the fast path
            self.updates.settings = {"loss_scale": 1.0} | {f"lr.{i}": rate for i, rate in enumerate(begun.rates)}

    def _before_update(
        self, tracker: OptimizerTracker, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        began = time.perf_counter()
        self.leave_fast_path()
        tracker.num_updates += 1
        if tracker.num_updates == MAX_UPDATES:
            self.updates.end_sampling(self._trackers)
            if self._activations:
                self._activations.pause()
        self.updates.before_update(tracker, args, kwargs)
        self._meter.hooks_s += time.perf_counter() - began

    def _after_update(
        self, tracker: OptimizerTracker, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        began = time.perf_counter()
        self.leave_fast_path()
        self.updates.after_update(tracker)
        self._meter.hooks_s += time.perf_counter() - began

    @best_effort(ACTIVATIONS)
    def _arm_activations(self) -> None:
        if self._activations is not None:
            began = time.perf_counter()
            self._activations.arm()
            self._meter.optional_s += time.perf_counter() - began

    @best_effort(ACTIVATIONS)
    def _read_activations(self) -> tuple[dict[str, Tensor | NDArray[Any]], list[UnitMask | None] | None]:
        """Return the readings of the activations, and their dead units if the host knows them."""
        assert self._activations is not None, "only a probe that is there is due"
        act_SA = self._activations.read()
        if act_SA is None:
            return {}, None
        if act_SA.is_cpu:  # copied: the next step may write to the bits before a deferred row is complete
            units = self._activations.packed_units()
            return {"act": act_SA}, [None if u is None else UnitMask(u.bits.copy(), u.number) for u in units]
        dead = enumerate(self._activations.dead_units())
        return {"act": act_SA, **{f"dead.{a}": flag_C for a, flag_C in dead if flag_C is not None}}, None


def _hook(method: Callable[..., None], tracker: OptimizerTracker) -> Hook:
    """Return a method as the hook of one tracker, excluded from torch.compile if torch.compile is in use."""
    hook: Hook = functools.partial(method, tracker)
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return hook
    excluded: Hook = torch.compiler.disable(hook)

    def choose(*args: Any) -> None:
        if torch.compiler.is_compiling():
            excluded(*args)
        else:  # without the wrapper, which costs 4 us per call
            hook(*args)

    return choose
