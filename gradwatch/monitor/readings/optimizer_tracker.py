"""The parameters that one optimizer moves: its columns of the row, its probes, and the readings of the row so far."""

# L = parameter tensors of the model, P = those of one optimizer, K = those with histograms due, S = statistics,
# B = bins

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.monitor.budget import HistogramSlice
from gradwatch.monitor.fast_path import BegunStep, FastPath, Hook
from gradwatch.monitor.overhead import UpdateTimer
from gradwatch.monitor.readings.fused_statistics import fused_statistics
from gradwatch.monitor.readings.parameter_readings import HistogramReader, LearningRates, UpdateMeasurement
from gradwatch.monitor.row import Columns, OptimizerColumns, has_gradients, total_norm
from gradwatch.probe.device.backend import select_backend
from gradwatch.probe.device.sync import is_capturing, to_array, to_float
from gradwatch.probe.gradients.statistics import GradientProbe


@final
class OptimizerTracker:
    """Reads the parameters of one optimizer, and leaves the readings where they were computed.

    Args:
        optimizer: The optimizer.
        params: Its parameters.
        columns: Their columns in the row.
        first_group: Index of its first group among those of all optimizers.
        num_layers: Parameters of the model.

    Attributes:
        pending: Readings of the row so far, by the names of `RowBuilder.build`; tensors, or arrays if the host had to
            know them at once.
        is_observed: `observe` has read the gradients, and neither an update nor a backward pass came since.
        is_updated: The optimizer has moved its parameters since the last row.
        awaits_closure: The step in progress computes its gradients itself.
        rates: Reads the learning rates.
        histograms: Reads the histograms.
        update: Measures the updates.
        timer: Times the updates.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[Tensor], columns: Columns, first_group: int, num_layers: int
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.is_updated = False
        self._columns = columns
        self._is_on_cpu = bool(params) and params[0].device.type == "cpu"
        column_indices = tuple(range(num_layers) if isinstance(columns, slice) else map(int, columns))
        self._captured: dict[str, Tensor | NDArray[Any]] = {}
        self._fused = fused_statistics(optimizer, params, column_indices, num_layers)
        self._gradients = GradientProbe(params)
        self.rates = LearningRates(optimizer, first_group)
        self.histograms = HistogramReader(params, column_indices)
        self.update = UpdateMeasurement(params, optimizer, self._fused)
        self.timer = UpdateTimer()

    @property
    def is_awaiting_step(self) -> bool:
        """Whether the step in progress is to write the statistics of the gradients that it reads."""
        return self._fused is not None and self._fused.is_requested

    @property
    def columns(self) -> OptimizerColumns:
        """Its columns of the row in progress."""
        return OptimizerColumns(self._columns, self.histograms.columns_K)

    def begin(self, due: HistogramSlice | None) -> None:
        """Start a row.

        Args:
            due: The parameters whose histograms are due.
        """
        self.is_observed = self.awaits_closure = False
        self.histograms.begin(due)
        self.update.begin()
        if self._fused is not None and not self._captured:
            self._fused.reset()
        # every replay of a CUDA graph computes the captured readings again
        self.pending: dict[str, Tensor | NDArray[Any]] = {**self._captured}
        self.is_updated = bool(self._captured)

    def detach(self) -> None:
        """Stop the optimizer from writing statistics."""
        if self._fused is not None:
            self._fused.detach()
            self._fused = None

    def watch_backward(self) -> list[RemovableHandle]:
        """Hook the parameters to learn when a backward pass changes a gradient, and return the hooks."""

        def invalidate(_: Tensor) -> None:
            self.is_observed = False

        trainable = [p for p in self.params if p.requires_grad and p.is_leaf]
        return [p.register_post_accumulate_grad_hook(invalidate) for p in trainable]

    def fast_path(self, *, before: Hook, after: Hook, hooked: bool) -> FastPath | None:
        """Return the fast path of the optimizer; None if it has none.

        Args:
            before: The hook of the full path before an update.
            after: The same after an update.
            hooked: Whether these are hooks: without, an instrumented optimizer cannot be the one that reads.
        """
        extension, scaled = select_backend(), ("grad_scale", "found_inf")
        is_whole = self._is_on_cpu and isinstance(self._columns, slice)
        if extension is None or not is_whole or any(hasattr(type(self.optimizer), name) for name in scaled):
            return None
        fused_SL = None if self._fused is None or not hooked else self._fused.gradients_SL
        groups = self.rates.num_groups
        return FastPath(extension, self.params, groups=groups, fused_SL=fused_SL, before=before, after=after)

    def enter_fast_path(self) -> None:
        """Let an instrumented optimizer write the statistics of all gradients."""
        if self._fused is not None:
            self._fused.request_always()

    def leave_fast_path(self, begun: BegunStep | None, fastest_update_s: float) -> None:
        """Continue on the full path.

        Args:
            begun: The update in progress, if one has begun.
            fastest_update_s: Time of the shortest update on the fast path.
        """
        self.timer.learn(fastest_update_s)
        if self._fused is not None:
            self._fused.cancel()
            if begun is None:
                self._fused.clear()  # the statistics of the step before
        if begun is None:
            return
        if begun.gradients_SL is None:
            self.request_gradients()
        else:
            self.pending["grad"] = begun.gradients_SL.copy()

    def read_gradients(self, *, inverse_scale: float | Tensor = 1.0, is_counting: bool = False) -> None:
        """Read the statistics of the gradients.

        Args:
            inverse_scale: Factor that undoes a loss scale.
            is_counting: Whether `histograms.read` follows: on a CPU, gradients are then counted in the same pass.
        """
        counts_KB = self.histograms.gradient_counts() if is_counting and self._is_on_cpu else None
        self.pending["grad"] = self._gradients.read(
            inverse_scale=inverse_scale, counts_KB=counts_KB, first=self.histograms.first
        )

    def norm(self) -> float:
        """Return the total norm of the gradients that were read, waiting for the device."""
        read_SP = self.pending["grad"] = to_array(self.pending["grad"])
        return total_norm(read_SP)

    def norm_without_probe(self) -> float:
        """Return the total norm of the gradients as they are now, by torch alone."""
        return to_float(nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None]))

    def forget_scaled_gradients(self, *, has_scaler: bool) -> None:
        """Drop the reading of a skipped update if it is empty, or may not be the gradient of the loss.

        Args:
            has_scaler: Whether a scaler skipped the update. It does so if a gradient is not finite, after it has
                unscaled the gradients: finite gradients may still be scaled.
        """
        if (has_scaler and math.isfinite(self.norm())) or not has_gradients(to_array(self.pending["grad"])):
            del self.pending["grad"]

    def request_gradients(self, *, clipped: bool = False) -> bool:
        """Let the step in progress write the statistics of the gradients that it reads; return whether it can.

        Args:
            clipped: Whether they only serve for the total norm after clipping.
        """
        if self._fused is None:
            return False
        self._fused.request(clipped=clipped)
        return True

    def read_clipped(self) -> None:
        """Read the gradients as they are now, for their total norm after clipping."""
        if not self.request_gradients(clipped=True):
            self.pending["clipped"] = self._gradients.read()

    def extra_s(self, seconds: float) -> float:
        """Return the excess of an update's time that an instrumented optimizer spent on measuring the update."""
        if self._fused is None or self.awaits_closure:
            return 0.0
        return self.timer.extra_s(seconds, is_measuring=self._fused.is_measuring_update)

    def collect_step(self) -> None:
        """Collect the statistics that the step has written."""
        if self._fused is not None:
            self.pending |= self._fused.collect()
        if is_capturing(self.params):
            self.read_update()
            self._captured = {**self.pending}

    def read_update(self) -> None:
        """Read how far the update moved the weights."""
        row_2P = self.update.read() if self.is_updated else None
        if row_2P is not None:
            self.pending["update"] = row_2P


def split_by_optimizer(params: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> list[OptimizerTracker]:
    """Assign each parameter to the optimizer that moves it; parameters of no optimizer go to the last.

    Args:
        params: All parameters, in the order of the row's columns.
        optimizers: The optimizers.
    """
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    held_by_any = set().union(*held)
    trackers: list[OptimizerTracker] = []
    first_group = 0
    for i, optimizer in enumerate(optimizers):
        is_last = i == len(optimizers) - 1
        own = [
            k
            for k, p in enumerate(params)
            if not p.is_meta and (id(p) in held[i] or (is_last and id(p) not in held_by_any))  # meta: without values
        ]
        columns = slice(None) if len(own) == len(params) else np.array(own, np.intp)
        trackers.append(OptimizerTracker(optimizer, [params[k] for k in own], columns, first_group, len(params)))
        first_group += len(optimizer.param_groups)
    return trackers
