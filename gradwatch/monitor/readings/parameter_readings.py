"""Read learning rates, histograms and updates of one optimizer. Each reader keeps some state."""

# K = parameters with histograms due, B = bins, P = parameters of the optimizer

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.monitor.budget import HistogramSlice
from gradwatch.probe.device.sync import host_value_or_copy, is_capturing
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
            self._due = self._slices[due.of][due.place]

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
