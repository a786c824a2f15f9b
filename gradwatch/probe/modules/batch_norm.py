"""Compare the running statistics of batch normalisations, which validation sees, with those of the batches."""

# C = channels of one normalisation, N = normalisations

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase as Norm

from gradwatch.probe.device.sync import to_float, to_host

MOST = 8
"""Normalisations that are compared, spread over the model: what ails the statistics of one mostly ails all."""

TRACKED = 30
"""Batches that a statistic must have seen: at the usual momentum of 0.1, 4 % of its first value are left then."""

HASTY = 0.9
"""Momentum from which on running statistics are those of the last batch; what TensorFlow calls so is one minus this."""

NOTED = 0.5
"""Distance from which on it is noted: a shift by half a deviation, a variance off by a factor of 1.6."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


class Snapshot(NamedTuple):
    """Running statistics as they were when a validation loss was measured."""

    mean_C: Tensor
    var_C: Tensor
    batches: Tensor


@final
class Norms:
    """Compares running statistics with those of the batch that follows a validation.

    The new running statistic is (1 - momentum) times the old one plus momentum times that of the batch, so that two of
    them tell what the batch had. Between validations it costs nothing.

    Args:
        modules: The normalisations with running statistics, by name.
        across_steps: Whether to compare at all: it takes the step after a validation.
    """

    def __init__(self, modules: Mapping[str, Norm], *, across_steps: bool = True) -> None:
        stride = max(1, -(-len(modules) // MOST))
        self._norms = dict(list(modules.items())[::stride]) if across_steps else {}
        self._all = modules
        self._snapshots: dict[str, Snapshot] = {}
        self._is_first = True

    def read(self, *, is_validated: bool) -> Iterator[Fact]:
        """Yield how far the statistics are from the batches, on the step after one with a validation."""
        if self._snapshots:
            yield from self._compare()
            self._snapshots.clear()
        if is_validated:
            self._snapshots = {name: _snapshot(norm) for name, norm in self._norms.items() if _is_tracking(norm)}

    def settings(self) -> Iterator[Fact]:
        """Yield normalisations whose momentum lets nothing in, or nothing stay; once."""
        if not self._is_first:
            return
        self._is_first = False
        stuck = [name for name, norm in self._all.items() if norm.momentum == 0 and is_blank(norm)]
        hasty = [name for name, norm in self._all.items() if norm.momentum is not None and HASTY <= norm.momentum < 1]
        if stuck:
            text = "momentum 0 leaves running mean and variance at 0 and 1 for ever"
            yield "norm-stuck", stuck[0], text, {"momentum": 0.0, "normalisations": float(len(stuck))}
        if hasty:
            momentum = float(self._all[hasty[0]].momentum or 0)
            text = f"momentum {momentum:g} makes the running statistics those of the last batch"
            yield "norm-hasty", hasty[0], text, {"momentum": momentum, "normalisations": float(len(hasty))}

    def _compare(self) -> Iterator[Fact]:
        """Yield the normalisation whose running statistics are farthest from the batch."""
        pairs = [(self._norms[name], snapshot) for name, snapshot in self._snapshots.items()]
        device = pairs[0][1].mean_C.device
        far_N3 = to_host(torch.stack([_distance(norm, snapshot).to(device) for norm, snapshot in pairs]))
        measured = [
            (max(shift, spread), shift, spread, name)
            for name, (shift, spread, batches) in zip(self._snapshots, map(_floats, far_N3), strict=True)
            if batches >= TRACKED and math.isfinite(shift) and math.isfinite(spread)
        ]
        far, shift, spread, name = max(measured, default=(0.0, 0.0, 0.0, ""))
        if far >= NOTED:
            text = "how far the running statistics are from those of the next batch"
            yield "norm-distance", name, text, {"shift": shift, "log of spread": spread}


def has_statistics(norm: Norm) -> bool:
    """Say whether a normalisation keeps running statistics."""
    return norm.running_mean is not None and norm.running_var is not None and not norm.running_var.is_meta


def is_blank(norm: Norm) -> bool:
    """Say whether running statistics are as they were made: mean 0 and variance 1 in every channel."""
    assert norm.running_mean is not None, "only normalisations with statistics are looked at"
    assert norm.running_var is not None, "as above"
    return not to_float(norm.running_mean.abs().max() + (norm.running_var - 1).abs().max())


def _is_tracking(norm: Norm) -> bool:
    """Say whether statistics follow the batches; the mode does not tell, which a validation may have left behind."""
    return bool(norm.momentum) and norm.num_batches_tracked is not None


def _snapshot(norm: Norm) -> Snapshot:
    assert norm.running_mean is not None, "only normalisations with statistics are looked at"
    assert norm.running_var is not None, "as above"
    assert norm.num_batches_tracked is not None, "those that count their batches"
    return Snapshot(norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone())


def _distance(norm: Norm, before: Snapshot) -> Tensor:
    """Return how far statistics are from the batches since: shift in deviations, log of the spread, batches before.

    The first two are medians over the channels; not finite where no batch came.
    """
    after = _snapshot(norm)
    kept = (1 - (norm.momentum or 0.0)) ** (after.batches - before.batches).float()
    mean_C = (after.mean_C - kept * before.mean_C) / (1 - kept)
    var_C = ((after.var_C - kept * before.var_C) / (1 - kept)).clamp_min(norm.eps)
    shift = ((mean_C - before.mean_C).abs() / var_C.sqrt()).median()
    spread = (var_C / before.var_C.clamp_min(norm.eps)).log().abs().median()
    return torch.stack([shift, spread, before.batches]).float()


def _floats(row_3: NDArray[Any]) -> tuple[float, float, float]:
    shift, spread, batches = map(float, row_3)
    return shift, spread, batches
