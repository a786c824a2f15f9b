"""Reduce tensors on their device to 6 statistics each, with torch operations if no kernel supports the tensors."""

# S = statistics (the first six of catalogue.PARAM), L = tensors

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import sync

NUM_STATISTICS = 6


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, which every device except MPS supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a tensor, flat and contiguous; for complex values, the magnitudes."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()  # values of equal indices add up
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense() if tensor.is_mkldnn else tensor.values()
    if tensor.is_complex():
        tensor = tensor.abs()
    tensor = tensor.resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # a single element may keep any stride otherwise


def statistics(tensors: Sequence[torch.Tensor], *, native: ModuleType | None = None) -> torch.Tensor:
    """Compute the six statistics of tensors of any layout and dtype.

    Args:
        tensors: At least one, all on one device.
        native: The extension, for tensors on the CPU.

    Returns:
        Tensor of shape (S, L), float32, on their device. Norm, maximum and count of an empty tensor are 0, its other
        statistics nan. Values beyond float32 become Inf. On MPS, which lacks float64, sums are in float32.
    """
    values = [stored_values(t) for t in tensors]
    if native is not None:
        row_SL = torch.empty((NUM_STATISTICS, len(values)), dtype=torch.float32, device="cpu")
        plain = tuple(v.float() if v.itemsize == 1 else v for v in values)  # 8-bit floats, which the kernels lack
        rest = native.statistics(plain, False, row_SL, 1.0, None, 0, 0, torch.get_num_threads())
        assert rest is None, f"tensors {rest} were not read, though all of them are plain"
    elif values[0].is_cuda:
        row_SL = _statistics_on_gpu(values)
    else:
        row_SL = _statistics_of_values(values)
    for i, (tensor, stored) in enumerate(zip(tensors, values, strict=True)):
        # a sparse tensor: its other values are zero
        if stored.numel() != tensor.numel():
            row_SL[:, i] = _with_zeros(row_SL[:, i], stored=stored.numel(), numel=tensor.numel())
    return row_SL


def _statistics_on_gpu(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the statistics of plain tensors with Triton, or with torch operations if Triton fails."""
    plain = [v.float() if v.itemsize == 1 else v for v in values]
    row_SL: torch.Tensor | None = kernels.attempt_triton(lambda triton: triton.statistics(plain))
    return _statistics_of_values(values) if row_SL is None else row_SL


def _statistics_of_values(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the statistics of plain tensors with four reads of each, and a fifth if the CPU finds NaN or Inf."""
    device = values[0].device
    wide = wide_dtype(device)
    values = [v.float() if v.itemsize == 1 else v for v in values]
    filled = [v if v.numel() else v.new_zeros(1) for v in values]  # the maximum of nothing raises; its norm is 0
    numel_L = torch.tensor([v.numel() for v in values], dtype=wide).to(device, non_blocking=True)
    l2_L = torch.stack([torch.linalg.vector_norm(v, dtype=wide) for v in filled])
    mean_L = torch.stack([v.sum(dtype=wide) for v in values]) / numel_L
    absmax_L = torch.stack([torch.stack(torch.aminmax(v)).to(wide).abs().amax() for v in filled])
    nonzero_L = torch.stack([torch.count_nonzero(v) for v in values])
    std_L = (l2_L.square() / numel_L - mean_L.square()).clamp_min(0).sqrt()
    rows = [l2_L, absmax_L, mean_L, std_L, (numel_L - nonzero_L) / numel_L, _nonfinite(values, absmax_L).to(wide)]
    return torch.stack(rows).float()


def _nonfinite(values: Sequence[torch.Tensor], absmax_L: torch.Tensor) -> torch.Tensor:
    """Count NaN and Inf in each tensor."""
    # only the CPU checks first whether there are any: on a GPU the check would wait
    if absmax_L.device.type == "cpu":
        non_finite = [not math.isfinite(m) for m in sync.to_host(absmax_L)]
    else:
        non_finite = [True] * len(values)
    none = torch.zeros((), dtype=torch.int64, device=absmax_L.device)
    # v - v is 0 for a finite value and NaN for any other, and NaN counts as nonzero
    return torch.stack([torch.count_nonzero(v - v) if bad else none for v, bad in zip(values, non_finite, strict=True)])


def _with_zeros(stored_S: torch.Tensor, *, stored: int, numel: int) -> torch.Tensor:
    """Return the statistics of a sparse tensor from the statistics of its stored values; all other values are 0."""
    l2, absmax, mean, std, zero_frac, nonfinite = stored_S.to(wide_dtype(stored_S.device))
    if stored == 0:
        mean = std = zero_frac = l2  # they are nan; the norm of nothing is 0
    share = stored / numel
    # variance of a mixture: within the stored values, and between their mean and zero
    whole_std = (share * std.square() + share * (1 - share) * mean.square()).sqrt()
    zeros = zero_frac * share + (1 - share)
    return torch.stack([l2, absmax, mean * share, whole_std, zeros, nonfinite]).float()
