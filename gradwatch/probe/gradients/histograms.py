"""Count gradients and weights in fixed, signed, log-spaced bins, for TensorBoard."""

# L = parameter tensors, K = those that are counted, B = bins

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import dtensor, torch_reduce

# a bin is the exponent and the two highest mantissa bits of a float32: four to an octave, as in csrc/kernels/counts.h
_SHIFT = 21
_LOWEST_KEY = (127 - 40) * 4  # of 2^-40: smaller magnitudes count in the middle bin, with zero
_HIGHEST_KEY = (127 + 16) * 4  # of 2^16: larger magnitudes and Inf count in the outermost bin
_SIDE = _HIGHEST_KEY - _LOWEST_KEY + 1
_MAGNITUDE_MASK, _INFINITE_BITS = 0x7FFFFFFF, 0x7F800000

NUM_BINS = 2 * _SIDE + 1
ALL = slice(None)


def bin_edges() -> NDArray[np.float64]:
    """Return the edges of the bins, ascending, of shape (B + 1,).

    They run from minus to plus the largest float32, with 2^16 and 2^-40 on either side. A magnitude on an edge counts
    in the bin farther from zero.
    """
    keys = np.arange(_LOWEST_KEY, _HIGHEST_KEY + 1, dtype=np.uint32)
    positive = np.append((keys << _SHIFT).view(np.float32), np.finfo(np.float32).max).astype(np.float64)
    return np.concatenate([-positive[::-1], positive])


@final
class HistogramProbe:
    """Count histograms of gradients and weights of a model.

    Args:
        params: Parameters in the order of the rows.
        kernel: Backend that reads tensors on the CPU.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, kernel: kernels.Kernel = "auto") -> None:
        self._params = tuple(params)
        on_cpu = any(p.device.type == "cpu" for p in self._params)
        self._native = kernels.select_backend(kernel) if on_cpu else None

    def read(self, among: slice = ALL, *, gradients_KB: torch.Tensor | None = None) -> torch.Tensor:
        """Count the current values of gradients and weights.

        Args:
            among: Indices of the parameters to count.
            gradients_KB: Counts of the gradients, if the read of the statistics made them; otherwise None.

        Returns:
            Counts of shape (2, K, B), int64, on the device of the first parameter: gradients, then weights. NaN is in
            no bin. A parameter without gradient has all zero counts; a sparse gradient counts as if its zeros were
            stored, a complex tensor by magnitude.
        """
        params = self._params[among]
        if gradients_KB is None:
            gradients_KB = self._count(params, gradients=True)
        return torch.stack([gradients_KB, self._count(params, gradients=False)])

    def _count(self, params: tuple[torch.Tensor, ...], *, gradients: bool) -> torch.Tensor:
        # on the CPU first, where the extension writes; `None` from it means that it has read all
        counts_KB = torch.zeros((len(params), NUM_BINS), dtype=torch.int64, device="cpu")
        others: Sequence[int] | None = range(len(params))
        if self._native is not None:
            others = self._native.histograms(params, gradients, counts_KB, torch.get_num_threads())
        if others is None or not params:
            return counts_KB
        counts_KB = counts_KB.to(params[0].device, non_blocking=True)
        for i in others:
            tensor = params[i].grad if gradients else params[i]
            if tensor is not None:
                count(tensor, out_B=counts_KB[i])
        return counts_KB


def shares(params: Sequence[torch.Tensor], of: int) -> list[slice]:
    """Split parameters into consecutive shares of nearly equal numbers of values.

    Every parameter with values is in one share; some shares may be empty.
    """
    sizes_L = np.array([p.numel() for p in params], np.float64)
    # the middle of a parameter decides on its share, so that a large one is never split
    middles_L = (np.cumsum(sizes_L) - sizes_L / 2) / max(1.0, sizes_L.sum())
    ends = map(int, np.searchsorted(middles_L, np.arange(of + 1) / of))
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def empty(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a histogram of zeros for each parameter, of shape (K, B), on the device of the first parameter."""
    device = params[0].device if params else torch.device("cpu")
    return torch.zeros((len(params), NUM_BINS), dtype=torch.int64, device=device)


def count(tensor: torch.Tensor, *, out_B: torch.Tensor) -> None:
    """Write the histogram of a tensor of any layout, dtype and device, by torch operations.

    A distributed tensor counts by its part on this process.
    """
    out_B.copy_(_histogram(dtensor.local_part(tensor)), non_blocking=True)


def _histogram(tensor: torch.Tensor) -> torch.Tensor:
    """Count the values of a tensor of any layout, dtype and device. Returns counts of shape (B,), int64, there."""
    values = torch_reduce.stored_values(tensor)
    counts_B = _histogram_on_gpu(values) if values.is_cuda else None
    if counts_B is None:
        counts_B = _histogram_of_values(values)
    counts_B[_SIDE] += tensor.numel() - values.numel()  # zeros that a sparse tensor does not store
    return counts_B


def _histogram_on_gpu(values: torch.Tensor) -> torch.Tensor | None:
    plain = values.float() if values.itemsize == 1 else values
    return kernels.attempt_triton(lambda triton: triton.histogram(plain, shift=_SHIFT, lowest=_LOWEST_KEY, side=_SIDE))


def _histogram_of_values(values: torch.Tensor) -> torch.Tensor:
    """Count plain values by torch operations."""
    bits = values.float().view(torch.int32)
    magnitude = bits & _MAGNITUDE_MASK
    steps = ((magnitude >> _SHIFT) - (_LOWEST_KEY - 1)).clamp_(0, _SIDE)
    bins = torch.where(bits < 0, _SIDE - steps, _SIDE + steps)
    bins = torch.where(magnitude > _INFINITE_BITS, NUM_BINS, bins).to(torch.int64)  # NaN goes past the end
    counts = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=values.device)
    # an expanded 1 takes no memory; `bincount` would wait for a GPU
    counts.scatter_add_(0, bins, torch.ones((), dtype=torch.int64, device=values.device).expand_as(bins))
    return counts[:NUM_BINS]
