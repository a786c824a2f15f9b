"""Read all gradients of a model once and reduce them to one small row of statistics."""

# S = statistics (the first six of catalogue.PARAM), L = parameter tensors, K = those that are counted, B = bins

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import final

import torch

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import dtensor, torch_reduce
from gradwatch.probe.device.sync import on_device
from gradwatch.probe.gradients import histograms


@final
class GradientProbe:
    """Measure the statistics of every gradient of a model, in one call.

    Gradients may be of any dtype, layout and device, and may appear and disappear: each call looks them up again.

    Args:
        params: Parameters in the order of the columns.
        kernel: Backend that reads tensors on the CPU.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, kernel: kernels.Kernel = "auto") -> None:
        self._params = tuple(params)
        on_cpu = any(p.device.type == "cpu" for p in self._params)
        self._native = kernels.select_backend(kernel) if on_cpu else None
        self._shape_SL = (torch_reduce.NUM_STATISTICS, len(self._params))

    def read(
        self,
        *,
        inverse_scale: float | torch.Tensor = 1.0,
        out_SL: torch.Tensor | None = None,
        counts_KB: torch.Tensor | None = None,
        first: int = 0,
    ) -> torch.Tensor:
        """Compute the statistics of all current gradients.

        Args:
            inverse_scale: Factor that undoes the loss scale of gradients. For gradients on a GPU it may be a tensor on
                the same device.
            out_SL: Memory for the statistics, contiguous float32; only with the first parameter on the CPU.
            counts_KB: Memory for the histograms of K gradients, counted in the same read; see `histograms.empty`.
            first: Index of the first of the K gradients.

        Returns:
            Tensor of shape (S, L), float32, on the device of the first parameter, in the order of `catalogue.PARAM`.
            The column of a gradient that is None is nan. A sparse gradient counts with its zeros, a complex gradient by
            magnitude, a distributed gradient by its part on this process. Norm, maximum, mean and std of a gradient
            with NaN or Inf are NaN or Inf, as IEEE 754 defines. Norm, maximum and count of an empty gradient
            are 0, its mean, std and zero fraction nan.
        """
        if self._native is None:
            device = self._params[0].device if self._params else torch.device("cpu")
            row_SL = torch.empty(self._shape_SL, dtype=torch.float32, device=device) if out_SL is None else out_SL
            return self._complete(row_SL.fill_(math.nan), range(len(self._params)), inverse_scale, counts_KB, first)
        row_SL = torch.empty(self._shape_SL, dtype=torch.float32, device="cpu") if out_SL is None else out_SL
        last = first if counts_KB is None else first + len(counts_KB)  # an empty range counts nothing
        rest: Sequence[int] | None = self._native.statistics(
            self._params, True, row_SL, inverse_scale, counts_KB, first, last, torch.get_num_threads()
        )
        return row_SL if rest is None else self._complete(row_SL, rest, inverse_scale, counts_KB, first)

    def _complete(
        self,
        row_SL: torch.Tensor,
        columns: Iterable[int],
        inverse_scale: float | torch.Tensor,
        counts_KB: torch.Tensor | None,
        first: int,
    ) -> torch.Tensor:
        """Fill in the columns that need torch operations, device by device."""
        # one stack of reductions for each device, instead of one launch for each gradient
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for i in columns:
            grad = self._params[i].grad
            if grad is not None:
                by_device[grad.device].append(i)
        if self._params:
            row_SL = row_SL.to(self._params[0].device, non_blocking=True)
        for device, indices in by_device.items():
            grads = [g for i in indices if (g := self._params[i].grad) is not None]
            native = self._native if device.type == "cpu" else None
            part_SL = torch_reduce.statistics([dtensor.local_part(g) for g in grads], native=native)
            part_SL[:4] *= inverse_scale  # norm, maximum, mean and std are linear; the other rows are counts
            index = on_device(tuple(indices), row_SL.device)
            row_SL.index_copy_(1, index, part_SL.to(row_SL.device, non_blocking=True))
            for i, grad in zip(indices, grads, strict=True):
                if counts_KB is not None and first <= i < first + len(counts_KB):
                    histograms.count(grad, out_B=counts_KB[i - first])
        return row_SL
