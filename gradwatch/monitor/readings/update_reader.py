"""Read the gradients before an update, and the size of the update after it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from gradwatch.monitor.best_effort import best_effort, warn_once
from gradwatch.monitor.budget import NOTHING_DUE
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.readings.loss_scale import LossScaleReader
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker
from gradwatch.probe.device.sync import host_value_or_copy, is_capturing
from gradwatch.probe.device.transfer_queue import DeviceClock

HISTOGRAMS = "the histograms"

MAX_UPDATES = 100
"""Updates without a call of `Monitor.step` after which the sampled statistics of the row are complete."""


@final
class UpdateReader:
    """Reads gradients, weights and settings of optimizers around their updates. A failing feature is disabled.

    Args:
        params: All watched parameters.
        context: Shared by the parts of the monitor.
        loss_scale: Reads the GradScaler of the loop.
        device_clock: Measures the time that the device spends.

    Attributes:
        due: The statistics that are measured in the row in progress.
        settings: Loss scale and learning rates of the newest update, by their names in the catalogue.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        context: MonitorContext,
        *,
        loss_scale: LossScaleReader,
        device_clock: DeviceClock,
    ) -> None:
        self.attempts = context.attempts
        self.due = NOTHING_DUE
        self.settings: dict[str, float] = {}
        self._watched_ids = {id(p) for p in params}
        self._meter = context.meter
        self._loss_scale = loss_scale
        self._device_clock = device_clock

    def before_update(self, tracker: OptimizerTracker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the gradients before an update.

        Args:
            tracker: Tracker of the optimizer.
            args: Positional arguments of `Optimizer.step`, starting with the optimizer.
            kwargs: Keyword arguments of `Optimizer.step`.
        """
        tracker.is_updated = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        tracker.awaits_closure = closure is not None  # a closure computes the gradients, possibly several times
        end = self._device_clock.begin()
        self._read_before_update(tracker)
        end()
        if self.due.updates and not tracker.is_by_hand:
            self.keep_weights(tracker)

    @best_effort("the reading of updates")
    def _read_before_update(self, tracker: OptimizerTracker) -> None:
        inverse_scale = self._read_settings(tracker)
        if tracker.is_observed:  # before clipping, or the loop has called `observe` and may have clipped since
            tracker.read_clipped()
        elif not tracker.awaits_closure:
            self._read_gradients(tracker, inverse_scale=inverse_scale)
        if late := [p for p in tracker.rates.late_params() if id(p) not in self._watched_ids]:
            text = f"{len(late)} parameters came to the optimizer after gradwatch attached, and are not watched"
            warn_once(self.attempts.warned, "later parameters", text)

    def _read_settings(self, tracker: OptimizerTracker) -> float | Tensor:
        """Read loss scale and learning rates, and return the factor that undoes the scale of the gradients."""
        # a scaler leaves scaled gradients to fused optimizers, which decide on the device whether to skip the update
        scale, found_inf = getattr(tracker.optimizer, "grad_scale", None), getattr(tracker.optimizer, "found_inf", None)
        if found_inf is not None:
            self._read_found_inf(tracker, host_value_or_copy(found_inf))
        loss_scale = self._loss_scale.read()
        inverse_scale: float | Tensor = 1.0
        if scale is not None:
            loss_scale = host_value_or_copy(scale)
            inverse_scale = 1.0 / loss_scale
        self._put(tracker, {"loss_scale": loss_scale, **tracker.rates.read()})
        return inverse_scale

    def _read_found_inf(self, tracker: OptimizerTracker, found_inf: float | Tensor) -> None:
        if isinstance(found_inf, Tensor):
            tracker.pending["found_inf"] = found_inf
        else:
            tracker.is_updated = not found_inf  # the step skips the update if any gradient overflowed

    def _put(self, tracker: OptimizerTracker, settings: Mapping[str, float | Tensor]) -> None:
        # numbers are known; tensors are pending until the row arrives
        for name, value in settings.items():
            if isinstance(value, Tensor):
                tracker.pending[name] = value
            else:
                self.settings[name] = value

    def end_sampling(self, trackers: Sequence[OptimizerTracker]) -> None:
        """Complete the sampled statistics of a row that does not end, and warn."""
        self.read_updates(trackers)
        self.due = self.due._replace(updates=False, histograms=None)
        text = (
            f"the optimizer made {MAX_UPDATES} updates without a call of `monitor.step(loss)`, which records a step. "
            "Call it once after each `optimizer.step()`"
        )
        warn_once(self.attempts.warned, "steps", text)

    def after_update(self, tracker: OptimizerTracker) -> None:
        """Read the gradients of a closure, and the size of the update from the moments of the optimizer."""
        self._read_after_update(tracker)
        if tracker.update.is_traced:
            self.read_updates([tracker])
        tracker.is_observed = False

    @best_effort("the reading of updates")
    def _read_after_update(self, tracker: OptimizerTracker) -> None:
        if tracker.awaits_closure:
            if not tracker.is_observed:
                self._read_gradients(tracker)
            else:  # the closure has called `observe`, and may have clipped the gradients after it
                tracker.read_clipped()
        tracker.keep_captured()

    def observe(self, tracker: OptimizerTracker, *, needs_norm: bool) -> float:
        """Read the present gradients, and return their total norm if it is needed, else nan."""
        if needs_norm:
            norm = self._observed_norm(tracker)  # None if the probe is disabled, but the loop needs a norm
        else:
            norm = math.nan
            self._read_gradients(tracker)
        tracker.clipping.begin(is_noticed=False)
        tracker.is_observed = True
        return tracker.norm_without_probe() if norm is None else norm

    def read_unclipped(self, tracker: OptimizerTracker) -> None:
        """Read the present gradients, which are about to be clipped, without waiting for the device."""
        end = self._device_clock.begin()
        if self._read_gradients(tracker):
            tracker.clipping.begin(is_noticed=True)
            tracker.is_observed = True
        end()

    @best_effort("the norm that `observe` returns")
    def _observed_norm(self, tracker: OptimizerTracker) -> float | None:
        if not self._read_gradients(tracker):
            return None
        # a loop clips with this norm, so it must be the same on all processes
        return tracker.norm_without_probe() if tracker.is_sharded else tracker.norm()

    @best_effort("the reading of skipped updates")
    def read_skipped(self, trackers: Sequence[OptimizerTracker]) -> None:
        """Read the gradients of a skipped update, unless the loop has cleared them."""
        self.settings["loss_scale"] = self._loss_scale.wait()
        for tracker in trackers:
            self._put(tracker, tracker.rates.read())
            if "grad" not in tracker.pending and self._read_gradients(tracker):
                tracker.forget_scaled_gradients(has_scaler=self._loss_scale.has_scaler)

    @best_effort("the gradient probe")
    def _read_gradients(self, tracker: OptimizerTracker, *, inverse_scale: float | Tensor = 1.0) -> bool:
        """Read the gradients, and their histograms if they are due. Return whether this succeeded."""
        began = time.perf_counter()
        due = self.due.histograms if tracker.histograms.is_due and HISTOGRAMS not in self.attempts.left_out else None
        tracker.read_gradients(inverse_scale=inverse_scale, is_counting=due is not None)
        if due is not None:
            # an estimate of the time for counting, which shares the pass over the gradients
            self._meter.optional_s += (time.perf_counter() - began) / due.of
            self._read_histograms(tracker)
        return True

    @best_effort(HISTOGRAMS)
    def _read_histograms(self, tracker: OptimizerTracker) -> None:
        if not tracker.histograms.is_due or is_capturing(tracker.params):
            return  # sampled statistics are not part of a CUDA graph
        began = time.perf_counter()
        tracker.pending["counts"] = tracker.histograms.read()
        self._meter.optional_s += time.perf_counter() - began

    @best_effort("the update probe")
    def keep_weights(self, tracker: OptimizerTracker) -> None:
        """Prepare to measure the size of the next update."""
        began = time.perf_counter()
        tracker.update.prepare(awaits_closure=tracker.awaits_closure)
        self._meter.optional_s += time.perf_counter() - began

    @best_effort("the update probe")
    def read_updates(self, trackers: Sequence[OptimizerTracker]) -> None:
        """Read the size of the updates, if it is due."""
        if self.due.updates:
            began = time.perf_counter()
            for tracker in trackers:
                tracker.read_update()
            self._meter.optional_s += time.perf_counter() - began
