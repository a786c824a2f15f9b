"""Join the statistics of the parts of a distributed tensor (DTensor) over all processes, in one exchange."""

# L = tensors, K = statistics that add up, R = processes

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwatch.probe.device.torch_reduce import wide_dtype

L2, ABSMAX, MEAN, STD, ZERO_FRAC, NONFINITE = range(6)  # rows of `torch_reduce.statistics`
Spread = tuple[Any, tuple[int, ...]]
"""A mesh of devices, and its dimensions over which a tensor is split."""


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only if this was imported
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def gathers(module: torch.nn.Module) -> bool:
    """Return whether FSDP gathers whole parameters for each pass of a module, and frees them afterwards.

    The autograd graph of the loss contains the gathered parameters, not the parameters of the module and the optimizer.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module uses FSDP if this was not imported
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def shares_batches(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether ranks may train on one batch together, as in tensor parallelism: FSDP alone gives each its own."""
    modules = [module for model in models for module in model.modules()]
    sharded: list[Any] = [param for module in modules for param in module.parameters(recurse=False)]
    # FSDP shards a parameter over one dimension of the mesh, and copies it over the others
    dims = [sum(p.is_shard() for p in param.placements) for param in sharded if is_distributed(param)]
    return bool(dims) and (max(dims) > 1 or not any(gathers(module) for module in modules))


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory: reading a tensor with freed storage ends the process."""
    part = local_part(tensor.detach())
    # FSDP frees storage and keeps the tensor: then there are elements, but no bytes
    if part.is_meta:
        return False
    return part.layout != torch.strided or not part.numel() or part.untyped_storage().nbytes() > 0


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this process; the whole tensor if its parts are terms of a sum."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor.detach()
    # no statistic of a sum follows from the statistics of its terms
    if any(placement.is_partial() for placement in distributed.placements):
        whole: torch.Tensor = distributed.full_tensor()
        return whole
    part: torch.Tensor = distributed.to_local()
    return part


def join_statistics(part_SL: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the statistics of whole tensors from the statistics of their local parts.

    Every process must call this function with the same tensors in the same order. It takes one exchange per mesh.

    Args:
        part_SL: Statistics of each local part, of shape (6, L), in the order of `torch_reduce.statistics`.
        tensors: The whole tensors.

    Returns:
        Statistics of the same shape, dtype and order.
    """
    row_SL = part_SL.clone()  # columns of tensors that are not split stay as they are
    wide = wide_dtype(part_SL.device)
    for (mesh, dims), columns in _spreads(tensors).items():
        part_SC = part_SL[:, columns].to(wide)
        numel_C = torch.tensor([local_part(tensors[i]).numel() for i in columns], dtype=wide).to(part_SL.device)
        # of an empty part, mean, deviation and zero fraction are nan
        mean_C, std_C, zeros_C = (torch.where(numel_C > 0, part_SC[i], 0.0) for i in (MEAN, STD, ZERO_FRAC))
        # all rows but the last add up over processes, so one exchange is enough
        sums_KC = torch.stack(
            [
                numel_C,
                part_SC[L2].square(),
                mean_C * numel_C,
                (std_C.square() + mean_C.square()) * numel_C,
                zeros_C * numel_C,
                part_SC[NONFINITE],
                part_SC[ABSMAX],
            ]
        )
        gathered_RKC = _gather(sums_KC, mesh, dims)
        n_C, squares_C, sum_C, mean_square_C, zero_C, nonfinite_C = gathered_RKC[:, :-1].sum(0)
        whole_mean_C = sum_C / n_C
        row_SL[:, columns] = torch.stack(
            [
                squares_C.sqrt(),
                gathered_RKC[:, -1].amax(0),  # NaN if any part has NaN
                whole_mean_C,
                (mean_square_C / n_C - whole_mean_C.square()).clamp_min(0).sqrt(),
                zero_C / n_C,
                nonfinite_C,
            ]
        ).to(row_SL.dtype)
    return row_SL


def join_norms(part_KL: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return L2 norms of whole tensors from the norms of their local parts; see `join_statistics`.

    Args:
        part_KL: Any number of norms of each local part.
        tensors: The whole tensors.
    """
    row_KL = part_KL.clone()
    for (mesh, dims), columns in _spreads(tensors).items():
        row_KL[:, columns] = _gather(part_KL[:, columns].square(), mesh, dims).sum(0).sqrt()
    return row_KL


def join_counts(part_B: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return counts over a whole tensor from the counts over its local part; see `join_statistics`."""
    for mesh, dims in _spreads([tensor]):
        part_B = _gather(part_B, mesh, dims).sum(0)
    return part_B


def _spreads(tensors: Sequence[torch.Tensor]) -> dict[Spread, list[int]]:
    """Return the indices of split tensors, by mesh and by the dimensions of the mesh over which they are split."""
    spreads: defaultdict[Spread, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if not is_distributed(tensor):
            continue
        distributed: Any = tensor
        if any(placement.is_partial() for placement in distributed.placements):
            continue  # `local_part` has made the tensor whole
        dims = tuple(dim for dim, placement in enumerate(distributed.placements) if placement.is_shard())
        if dims:
            spreads[distributed.device_mesh, dims].append(i)
    return spreads


def _gather(mine: torch.Tensor, mesh: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """Gather a tensor from all processes along some dimensions of a mesh, stacked along a new first dimension."""
    gathered = mine[None]
    # one dimension after the other multiplies the number of rows by its size
    for dim in dims:
        group = mesh.get_group(dim)
        every = gathered.new_empty((group.size() * len(gathered), *mine.shape))
        torch.distributed.all_gather_into_tensor(every, gathered.contiguous(), group=group)
        gathered = every
    return gathered
