"""Read learning rates, clipping, histograms and updates of one optimizer. Each reader keeps some state."""

# S = statistics, P = parameters of the optimizer, C = parameters of one clipping, K = parameters with histograms due,
# B = bins

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.monitor.budget import HistogramSlice
from gradwatch.monitor.row import L2
from gradwatch.probe.device.sync import host_value_or_copy, is_capturing, is_on_host, on_device, to_array
from gradwatch.probe.device.torch_reduce import wide_dtype
from gradwatch.probe.gradients import histograms
from gradwatch.probe.gradients.histograms import HistogramProbe
from gradwatch.probe.updates.from_copy import CopyUpdateProbe
from gradwatch.probe.updates.from_moments import MomentUpdateProbe


@final
class LearningRates:
    """Reads the learning rates of the groups that an optimizer had when the monitor was attached.

    Args:
        optimizer: The optimizer.
        first_group: Index of its first group among the groups of all optimizers.
    """

    def __init__(self, optimizer: Optimizer, first_group: int) -> None:
        self._optimizer = optimizer
        # groups that are added later have no column in the history
        self._names = [f"lr.{i}" for i in range(first_group, first_group + len(optimizer.param_groups))]

    @property
    def num_groups(self) -> int:
        """Number of groups when the monitor was attached."""
        return len(self._names)

    def read(self) -> dict[str, float | Tensor]:
        """Return the learning rates by their names in the catalogue, as numbers or as copies on their device."""
        rates: dict[str, float | Tensor] = {}
        # a loaded checkpoint replaces the groups, so they are looked up each time; not strict, as groups may be added
        for name, group in zip(self._names, self._optimizer.param_groups, strict=False):
            rate = group.get("lr", math.nan)
            rates[name] = host_value_or_copy(rate) if isinstance(rate, Tensor) else float(rate)
        return rates

    def late_params(self) -> list[Tensor]:
        """Return the parameters of groups that were added after the monitor was attached."""
        return [p for group in self._optimizer.param_groups[len(self._names) :] for p in group["params"]]


@final
class ClipFactors:
    """Keeps the factors by which clipping has scaled the gradients of an optimizer since they were read.

    The factors hold while nothing else writes to the gradients, which their version counters show.

    Args:
        params: Parameters of the optimizer.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._factors_P: Tensor | None = None
        self._versions: int | None = None  # the sum that clipping leaves; None if other code may have clipped

    def begin(self, *, is_noticed: bool) -> None:
        """Start after a reading of the gradients.

        Args:
            is_noticed: Whether all clipping calls `scale`. Otherwise the loop may clip by its own code.
        """
        self.resume(None, self._sum_versions() if is_noticed else None)

    def resume(self, factors_P: Tensor | None, versions: int | None) -> None:
        """Continue after native code, with its factors and its sum of version counters."""
        self._factors_P, self._versions = factors_P, versions

    def scale(self, factor: float | Tensor | None, index_C: NDArray[np.intp]) -> None:
        """Scale some gradients by a factor; None if the factors differ, or are unknown."""
        if factor is None or self._versions is None:
            self._versions = None
            return
        if self._factors_P is None:
            device = factor.device if isinstance(factor, Tensor) else torch.device("cpu")
            self._factors_P = torch.ones(len(self._params), dtype=wide_dtype(device), device=device)
        # a new tensor, since a CUDA graph repeats the multiplication at each replay
        scales_P = torch.ones_like(self._factors_P)
        scale = factor.to(scales_P) if isinstance(factor, Tensor) else factor
        scales_P[on_device(tuple(map(int, index_C)), scales_P.device)] = scale
        self._factors_P = self._factors_P * scales_P
        self._versions += sum(self._params[i].grad is not None for i in index_C)  # one write to each gradient

    def apply(self, row_SP: Tensor | NDArray[Any]) -> Tensor | NDArray[Any] | None:
        """Return the statistics of the gradients with the norms after clipping; None if they must be read again."""
        if self._versions is None or self._versions != self._sum_versions():
            return None
        if self._factors_P is None:
            return row_SP
        if is_on_host(self._factors_P):
            array_SP: NDArray[Any] = to_array(row_SP).astype(np.float64)
            array_SP[L2] *= to_array(self._factors_P)
            return array_SP
        assert isinstance(row_SP, Tensor), "only readings of a CPU are arrays"
        clipped_SP = row_SP.to(self._factors_P, copy=True)
        clipped_SP[L2] *= self._factors_P
        return clipped_SP

    def _sum_versions(self) -> int:
        return sum(p.grad._version for p in self._params if p.grad is not None)


@final
class HistogramReader:
    """Reads the histograms that are due.

    Args:
        params: Parameters of the optimizer.
        columns: Their columns in the row.
    """

    def __init__(self, params: Sequence[Tensor], columns: tuple[int, ...]) -> None:
        self._params = params
        self._columns = columns
        self._probe = HistogramProbe(params)
        self._slices: dict[int, list[slice]] = {}
        self._due = slice(0, 0)
        self._gradients_KB: Tensor | None = None

    @property
    def is_due(self) -> bool:
        """Return whether histograms of any parameter are due."""
        return self._due.start < self._due.stop

    @property
    def columns_K(self) -> NDArray[np.intp]:
        """Columns of the parameters with histograms due."""
        return np.array(self._columns[self._due], np.intp)

    @property
    def first(self) -> int:
        """Index of the first parameter with a histogram due."""
        return self._due.start

    def begin(self, due: HistogramSlice | None) -> None:
        """Start a row, given the parameters with histograms due."""
        self._gradients_KB = None
        self._due = slice(0, 0)
        if due is not None:
            if due.of not in self._slices:  # cached: balancing the slices visits all parameters
                self._slices[due.of] = histograms.shares(self._params, due.of)
            self._due = self._slices[due.of][due.number]

    def gradient_counts(self) -> Tensor:
        """Return a buffer of shape (K, B) for the counts of gradients. The caller fills it before `read`."""
        self._gradients_KB = histograms.empty(self._params[self._due])
        return self._gradients_KB

    def read(self) -> Tensor:
        """Return the counts of gradients and weights, of shape (2, K, B)."""
        counts_2KB, self._gradients_KB = self._probe.read(self._due, gradients_KB=self._gradients_KB), None
        return counts_2KB


@final
class UpdateMeasurement:
    """Measures the size of an update, from the moments of the optimizer or from a copy of the weights.

    Args:
        params: Parameters of the optimizer.
        optimizer: The optimizer.

    Attributes:
        is_traced: The update is computed from the moments of the optimizer, right after the step.
    """

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._params = params
        self._copies = CopyUpdateProbe(params)
        self._traces = MomentUpdateProbe(params, optimizer)
        self.begin()

    def begin(self) -> None:
        """Start a row."""
        self._is_prepared = self.is_traced = False

    def prepare(self, *, awaits_closure: bool) -> None:
        """Prepare for an update: copy the weights, unless the moments of the optimizer suffice.

        Args:
            awaits_closure: Whether the step computes its gradients in a closure.
        """
        if not is_capturing(self._params):  # sampled statistics are not part of a CUDA graph
            self.is_traced = not awaits_closure and self._traces.before()
            if not self.is_traced:
                self._copies.before()
            self._is_prepared = True

    def read(self) -> Tensor | None:
        """Return weight norms and update ratios, of shape (2, P), or None if `prepare` was not called."""
        if not self._is_prepared:
            return None
        self._is_prepared = False  # a traced update is read right after it, and must not be read again by the row
        return self._traces.after() if self.is_traced else self._copies.after()

    def read_weights(self) -> Tensor | None:
        """Return weight norms and nan for the ratios, of shape (2, P), or None while a CUDA graph is captured."""
        return None if is_capturing(self._params) else self._copies.norms()
