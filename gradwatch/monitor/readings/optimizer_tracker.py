"""Track one optimizer: its parameters, its columns of the row, its probes, and its readings so far."""

# L = parameter tensors of the model, P = parameter tensors of one optimizer, S = statistics, B = bins,
# K = parameter tensors with histograms due

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.monitor.budget import HistogramSlice
from gradwatch.monitor.fast_path import FastPath, Hook
from gradwatch.monitor.readings.hand_updates import HandUpdates
from gradwatch.monitor.readings.parameter_readings import (
    ClipFactors,
    HistogramReader,
    LearningRates,
    UpdateMeasurement,
)
from gradwatch.monitor.row import Columns, OptimizerColumns, has_gradients, total_norm
from gradwatch.probe.device import dtensor
from gradwatch.probe.device.backend import select_backend
from gradwatch.probe.device.sync import is_capturing, to_array, to_float
from gradwatch.probe.gradients.statistics import GradientProbe


@final
class OptimizerTracker:
    """Reads the parameters of one optimizer, and leaves the readings on their device.

    Args:
        optimizer: The optimizer.
        params: Its parameters, and with the last optimizer those that no optimizer holds.
        columns: Their columns in the row.
        owned_P: Whether any optimizer holds each of them; None if all are held, or none of the model.
        first_group: Index of its first group among the groups of all optimizers.
        num_layers: Parameters of the model.

    Attributes:
        pending: Readings of the row so far, by the names of `RowBuilder.build`: tensors, or arrays if the host needed
            them at once.
        is_by_hand: Whether the loop moves the weights without an optimizer.
        is_sharded: Whether parameters are spread over processes.
        is_observed: The gradients were read before clipping, by `observe` or when torch clipped them. No update or
            backward pass has followed.
        is_updated: The optimizer has updated its parameters since the last row.
        num_updates: Updates since the last row that were recorded in Python.
        awaits_closure: The step in progress computes its gradients in a closure.
        clipping: Keeps the factors of the clipping since then.
        rates: Reads the learning rates.
        histograms: Reads the histograms.
        update: Measures the updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        columns: Columns,
        first_group: int,
        num_layers: int,
        owned_P: NDArray[np.bool_] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_by_hand = isinstance(optimizer, HandUpdates)
        self.params = params
        self.is_sharded = any(map(dtensor.is_distributed, params))
        self.is_updated = False
        self.num_updates = 0
        self._columns, self._owned_P = columns, owned_P
        self._is_on_cpu = bool(params) and params[0].device.type == "cpu"
        column_indices = tuple(range(num_layers) if isinstance(columns, slice) else map(int, columns))
        self._captured: dict[str, Tensor | NDArray[Any]] = {}
        self._gradients = GradientProbe(params)
        self.clipping = ClipFactors(params)
        self.rates = LearningRates(optimizer, first_group)
        self.histograms = HistogramReader(params, column_indices)
        self.update = UpdateMeasurement(params, optimizer)

    @property
    def columns(self) -> OptimizerColumns:
        """Its columns of the row in progress."""
        return OptimizerColumns(self._columns, self.histograms.columns_K, self._owned_P)

    def begin(self, due: HistogramSlice | None) -> None:
        """Start a row.

        Args:
            due: The parameters with histograms due.
        """
        self.is_observed = self.awaits_closure = False
        self.num_updates = 0
        self.histograms.begin(due)
        self.update.begin()
        # every replay of a CUDA graph computes the captured readings again
        self.pending: dict[str, Tensor | NDArray[Any]] = {**self._captured}
        self.is_updated = bool(self._captured)

    def mark_updated(self, *_: object) -> None:
        """Record that the loop has updated the parameters, as a hook of the optimizer."""
        self.is_updated = True

    def watch_backward(self) -> list[RemovableHandle]:
        """Hook the parameters to detect backward passes that change a gradient, and return the hooks."""

        def invalidate(_: Tensor) -> None:
            self.is_observed = False

        # torch takes this hook only on leaves that require a gradient
        trainable = [p for p in self.params if p.requires_grad and p.is_leaf]
        return [p.register_post_accumulate_grad_hook(invalidate) for p in trainable]

    def fast_path(self, *, before: Hook, after: Hook) -> FastPath | None:
        """Return the fast path of the optimizer; None if it has none.

        Args:
            before: The hook of the full path before an update.
            after: The hook of the full path after an update.
        """
        extension, scaled = select_backend(), ("grad_scale", "found_inf")
        is_whole = self._is_on_cpu and isinstance(self._columns, slice)
        # native code fills whole rows, and finds `grad_scale` and `found_inf` only in the instance of an optimizer
        if extension is None or not is_whole or any(hasattr(type(self.optimizer), name) for name in scaled):
            return None
        return FastPath(
            extension,
            self.params,
            owned_L=self._owned_P,
            groups=self.rates.num_groups,
            before=before,
            after=after,
        )

    def read_gradients(self, *, inverse_scale: float | Tensor = 1.0, is_counting: bool = False) -> None:
        """Read the statistics of the gradients.

        Args:
            inverse_scale: Factor that undoes a loss scale.
            is_counting: Whether `histograms.read` follows. On a CPU, one pass then also counts the gradients.
        """
        counts_KB = self.histograms.gradient_counts() if is_counting and self._is_on_cpu else None
        self.pending["grad"] = self._gradients.read(
            inverse_scale=inverse_scale, counts_KB=counts_KB, first=self.histograms.first
        )

    def norm(self) -> float:
        """Return the total norm of the read gradients that an optimizer holds, waiting for the device.

        For distributed gradients, only the parts on this process count.
        """
        # kept as an array, so that the row does not wait for the device again
        read_SP = self.pending["grad"] = to_array(self.pending["grad"])
        return total_norm(read_SP, self._owned_P)

    def norm_without_probe(self) -> float:
        """Return the total norm of the present gradients, computed by torch without the probe.

        All processes that share a gradient must call it.
        """
        return to_float(dtensor.total_norm([p.grad for p in self.params if p.grad is not None]))

    def forget_scaled_gradients(self, *, has_scaler: bool) -> None:
        """Drop the reading of a skipped update if it is empty or may be scaled.

        Args:
            has_scaler: Whether a scaler skipped the update.
        """
        # a scaler skips if a gradient is not finite, after it has unscaled them: finite gradients may still be scaled
        if (has_scaler and math.isfinite(self.norm())) or not has_gradients(to_array(self.pending["grad"])):
            del self.pending["grad"]

    def read_clipped(self) -> None:
        """Read the present gradients for the total norm after clipping, unless the factors of the clipping suffice."""
        clipped_SP = self.clipping.apply(self.pending["grad"]) if "grad" in self.pending else None
        self.pending["clipped"] = self._gradients.read() if clipped_SP is None else clipped_SP

    def keep_captured(self) -> None:
        """Keep the readings of an update in a captured CUDA graph: each replay computes them again."""
        if is_capturing(self.params):
            self._captured = {**self.pending}

    def read_update(self) -> None:
        """Read the weights, and the size of the update if there was one."""
        row_2P = self.update.read() if self.is_updated else self.update.read_weights()
        if row_2P is not None:
            self.pending["update"] = row_2P


def split_by_optimizer(params: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> list[OptimizerTracker]:
    """Assign each parameter to its optimizer. Parameters without an optimizer go to the last optimizer.

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
        # a slice: one optimizer with all parameters fills a row without an index, and may use the fast path
        columns = slice(None) if len(own) == len(params) else np.array(own, np.intp)
        owned_P = np.array([id(params[k]) in held_by_any for k in own], np.bool_)
        # if no parameter is held, the loop moves them by hand, and all gradients count
        is_whole = owned_P.all() or held_by_any.isdisjoint(map(id, params))
        own_params = [params[k] for k in own]
        trackers.append(
            OptimizerTracker(optimizer, own_params, columns, first_group, len(params), None if is_whole else owned_P)
        )
        first_group += len(optimizer.param_groups)
    return trackers
