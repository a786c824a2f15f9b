"""Compare the running statistics of batch normalizations, which validation uses, with the statistics of batches."""

# C = channels of one normalization, N = normalizations

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase as Norm

from gradwatch.events import NORM_DISTANCE, NORM_HASTY, NORM_STUCK, Observation
from gradwatch.probe.device.sync import to_float, to_host

MAX_NORMS = 8
"""Maximum number of normalizations to compare, spread over the model: most faults affect all of them."""

MIN_TRACKED_BATCHES = 30
"""Minimum number of batches in a running statistic: at momentum 0.1, 4 % of the initial value then remain."""

HASTY_MOMENTUM = 0.9
"""Momentum at which running statistics forget all but the last batch. TensorFlow's momentum is 1 minus torch's."""

MIN_DISTANCE = 0.5
"""Minimum distance to record an event: a shift by half a deviation, or a variance off by a factor of 1.6."""


class RunningStatistics(NamedTuple):
    """Running statistics at the time of a validation."""

    mean_C: Tensor
    var_C: Tensor
    batches: Tensor


@final
class BatchNormStatistics:
    """Compare running statistics with the statistics of the batch that follows a validation.

    The new statistic is (1 - momentum) times the old one plus momentum times the statistic of the batch. So two running
    statistics give the statistic of the batch. Between validations there is no cost.

    Args:
        modules: The normalizations with running statistics, by name.
        across_steps: Whether to compare at all: the comparison needs the step after a validation.
    """

    def __init__(self, modules: Mapping[str, Norm], *, across_steps: bool = True) -> None:
        stride = max(1, -(-len(modules) // MAX_NORMS))  # rounded up, so that at most MAX_NORMS remain
        self._norms = dict(list(modules.items())[::stride]) if across_steps else {}
        self._all = modules
        self._snapshots: dict[str, RunningStatistics] = {}
        self._is_first = True

    def compare(self, *, is_validated: bool) -> Iterator[Observation]:
        """Yield the distance of the statistics from a batch, on the step after a validation."""
        # compare before taking new snapshots: two steps in a row may both have a validation
        if self._snapshots:
            yield from self._farthest()
            self._snapshots.clear()
        if is_validated:
            self._snapshots = {name: _snapshot(norm) for name, norm in self._norms.items() if _is_tracking(norm)}

    def find_odd_momenta(self) -> Iterator[Observation]:
        """Yield, once, normalizations with a momentum that keeps the initial statistics, or only the last batch's."""
        if not self._is_first:
            return
        self._is_first = False
        # statistics with other than the initial values were measured earlier, and momentum 0 keeps them
        stuck = [name for name, norm in self._all.items() if norm.momentum == 0 and is_blank(norm)]
        hasty = [
            name
            for name, norm in self._all.items()
            # a momentum of None is a cumulative average, which forgets nothing
            if norm.momentum is not None and HASTY_MOMENTUM <= norm.momentum < 1
        ]
        if stuck:
            yield NORM_STUCK.observe(stuck[0], values={"momentum": 0.0, "normalisations": len(stuck)})
        if hasty:
            momentum = float(self._all[hasty[0]].momentum or 0)
            yield NORM_HASTY.observe(hasty[0], values={"momentum": momentum, "normalisations": len(hasty)})

    def _farthest(self) -> Iterator[Observation]:
        """Yield the normalization with the running statistics that are farthest from the batch."""
        pairs = [(self._norms[name], snapshot) for name, snapshot in self._snapshots.items()]
        # one stack on one device, so that the host waits once
        device = pairs[0][1].mean_C.device
        far_N3 = to_host(torch.stack([_distance(norm, snapshot).to(device) for norm, snapshot in pairs]))
        measured = [
            (max(shift, spread), shift, spread, name)
            for name, (shift, spread, batches) in zip(self._snapshots, far_N3, strict=True)
            # not finite without a batch since the snapshot
            if batches >= MIN_TRACKED_BATCHES and math.isfinite(shift) and math.isfinite(spread)
        ]
        far, shift, spread, name = max(measured, default=(0.0, 0.0, 0.0, ""))
        if far >= MIN_DISTANCE:
            yield NORM_DISTANCE.observe(name, values={"shift": float(shift), "log of spread": float(spread)})


def has_statistics(norm: Norm) -> bool:
    """Return whether a normalization keeps running statistics."""
    # a meta tensor has no values to read
    return norm.running_mean is not None and norm.running_var is not None and not norm.running_var.is_meta


def is_blank(norm: Norm) -> bool:
    """Return whether running statistics have their initial values: mean 0 and variance 1 in every channel."""
    assert norm.running_mean is not None, "only normalizations with statistics are inspected"
    assert norm.running_var is not None, "as above"
    return not to_float(norm.running_mean.abs().max() + (norm.running_var - 1).abs().max())


def _is_tracking(norm: Norm) -> bool:
    # not `norm.training`: a validation may have changed the mode
    return bool(norm.momentum) and norm.num_batches_tracked is not None


def _snapshot(norm: Norm) -> RunningStatistics:
    assert norm.running_mean is not None, "only normalizations with statistics are inspected"
    assert norm.running_var is not None, "as above"
    assert norm.num_batches_tracked is not None, "only normalizations that count their batches"
    return RunningStatistics(norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone())


def _distance(norm: Norm, before: RunningStatistics) -> Tensor:
    """Return the distance of statistics from the batches since a snapshot.

    Returns:
        Tensor of shape (3,): shift in deviations, log of the spread, and batches before the snapshot. The first two are
        medians over the channels, and not finite if there was no batch.
    """
    after = _snapshot(norm)
    # the part of the snapshot that is left in the statistics of now; 1 without a batch, so the division gives nan
    kept = (1 - (norm.momentum or 0.0)) ** (after.batches - before.batches).float()
    mean_C = (after.mean_C - kept * before.mean_C) / (1 - kept)
    # rounding may make the difference of two variances negative
    var_C = ((after.var_C - kept * before.var_C) / (1 - kept)).clamp_min(norm.eps)
    shift = ((mean_C - before.mean_C).abs() / var_C.sqrt()).median()
    spread = (var_C / before.var_C.clamp_min(norm.eps)).log().abs().median()
    return torch.stack([shift, spread, before.batches]).float()
