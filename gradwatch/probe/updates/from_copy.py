"""Measure how far an optimizer step moves each weight, from a copy of the weights before the step."""

# L = parameter tensors

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import dtensor, torch_reduce
from gradwatch.probe.device.sync import on_device

_ALIGNMENT = 64  # bytes of a cache line: vector instructions read aligned memory faster


@final
class CopyUpdateProbe:
    """Measure weight norms and update/weight ratios on some steps.

    Call `before` before the optimizer step and `after` after it. The first `before` allocates the copy, which takes as
    much memory as the parameters.

    Args:
        params: Parameters in the order of the columns.
        kernel: Backend that reads tensors on the CPU.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, kernel: kernels.Kernel = "auto") -> None:
        self._params = tuple(params)
        on_cpu = any(p.device.type == "cpu" for p in self._params)
        self._native = kernels.select_backend(kernel) if on_cpu else None
        self._flat: torch.Tensor | None = None
        self._offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._copies: dict[int, torch.Tensor] = {}
        self._is_armed = False

    def before(self) -> None:
        """Copy the current weights."""
        self._is_armed = True
        others: Sequence[int] | None = range(len(self._params))
        if self._native is not None:
            if self._flat is None:
                self._allocate()
            others = self._native.keep(self._params, self._flat, self._offsets)
        for i in others or ():
            weight = _real(self._params[i])
            if i in self._copies:
                self._copies[i].copy_(weight, non_blocking=True)
            else:
                self._copies[i] = weight.clone()

    def after(self) -> torch.Tensor:
        """Compare the weights with the copy that the last `before` made; each copy serves one comparison.

        Returns:
            Tensor of shape (2, L), float32, on the device of the first parameter: the L2 norm of the weight before the
            update, and the L2 norm of the update divided by the norm of the weight. The ratio is nan if the weight was
            all zero or has values that are not finite. For a distributed weight, only the part on this process counts.
        """
        assert self._is_armed, "before() must be called ahead of after()"
        self._is_armed = False
        if self._native is None:
            device = self._params[0].device if self._params else torch.device("cpu")
            blank_2L = torch.full((2, len(self._params)), math.nan, dtype=torch.float32, device=device)
            return self._complete(blank_2L, range(len(self._params)))
        row_2L = torch.empty((2, len(self._params)), dtype=torch.float32, device="cpu")
        others: Sequence[int] | None = self._native.changes(self._params, self._flat, self._offsets, row_2L)
        # a parameter that the extension could read in `before`, but not now, has no copy here
        return row_2L if others is None else self._complete(row_2L, [i for i in others if i in self._copies])

    def norms(self) -> torch.Tensor:
        """Return the norms of the weights as they are, and nan for the ratios: what `after` gives without an update."""
        device = self._params[0].device if self._params else torch.device("cpu")
        row_2L = torch.full((2, len(self._params)), math.nan, dtype=torch.float32, device=device)
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for i, param in enumerate(self._params):
            by_device[param.device].append(i)
        for source, indices in by_device.items():
            weights = [_values(self._params[i]) for i in indices]  # the norms widen half precision one by one
            norm_L = torch.stack(torch._foreach_norm(weights, 2, dtype=torch_reduce.wide_dtype(source)))
            row_2L[0].index_copy_(0, on_device(tuple(indices), device), norm_L.float().to(device, non_blocking=True))
        return row_2L

    def _allocate(self) -> None:
        # only weights on the CPU: the extension reads no others, and their room is empty
        bytes_L = [p.numel() * p.itemsize if p.device.type == "cpu" else 0 for p in self._params]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in bytes_L]
        self._offsets = torch.tensor([0, *accumulate(rooms)], dtype=torch.int64, device="cpu")
        self._flat = torch.empty(sum(rooms), dtype=torch.uint8, device="cpu")

    def _complete(self, row_2L: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
        """Fill in the columns that need torch operations, device by device. Overwrites the copies with the updates."""
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for i in columns:
            by_device[self._copies[i].device].append(i)
        if self._params:
            row_2L = row_2L.to(self._params[0].device, non_blocking=True)
        for device, indices in by_device.items():
            wide = torch_reduce.wide_dtype(device)
            copies = [self._copies[i] for i in indices]
            weight_L = torch.stack(torch._foreach_norm(copies, 2, dtype=wide))
            # in place, which needs no further memory; the sign does not matter to a norm
            torch._foreach_sub_(copies, [_real(self._params[i]) for i in indices])
            update_L = torch.stack(torch._foreach_norm(copies, 2, dtype=wide))
            ratio_L = update_L / weight_L
            ratio_L = torch.where(torch.isfinite(ratio_L), ratio_L, math.nan)
            index = on_device(tuple(indices), row_2L.device)
            part_2L = torch.stack([weight_L, ratio_L]).float().to(row_2L.device, non_blocking=True)
            row_2L.index_copy_(1, index, part_2L)
        return row_2L


def _values(weight: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of the local part of a weight."""
    weight = dtensor.local_part(weight).detach()
    return torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight


def _real(weight: torch.Tensor) -> torch.Tensor:
    """Return the local part of a weight as float32 or float64.

    Half precision is widened, because the difference of two halves would be rounded again.
    """
    weight = _values(weight)
    return weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
