"""Find the part of a distributed tensor (DTensor) on this process, and the ranks that hold the other parts."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwatch.probe.device import torch_reduce
from gradwatch.probe.device.sync import to_ints
from gradwatch.probe.device.torch_reduce import wide_dtype
from gradwatch.records import ShardInfo


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
    dims = [len(_split_dims(param)) for param in sharded if is_distributed(param)]
    return bool(dims) and (max(dims) > 1 or not any(gathers(module) for module in modules))


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory: reading a tensor with freed storage ends the process."""
    part = local_part(tensor).detach()
    # FSDP frees storage and keeps the tensor: then there are elements, but no bytes
    if part.is_meta:
        return False
    return part.layout != torch.strided or not part.numel() or part.untyped_storage().nbytes() > 0


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this process: its shard, or its term if the parts are terms of a sum."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    with torch.no_grad():  # autograd would record the operation, which takes 0.1 ms
        part: torch.Tensor = distributed.to_local()
    return part


def find_shards(params: Sequence[torch.Tensor]) -> tuple[ShardInfo, ...]:
    """Return which ranks hold parts of the parameters of this process, by set of ranks.

    Args:
        params: Parameters in the order of the columns.
    """
    found: defaultdict[tuple[tuple[int, ...], bool], list[int]] = defaultdict(list)
    for i, param in enumerate(params):
        if not is_distributed(param):
            continue
        dims = _split_dims(param)
        ranks = _ranks(param, dims or range(len(_placements(param))))
        if len(ranks) > 1:
            found[ranks, bool(dims)].append(i)
    shards = []
    for (ranks, is_split), layers in found.items():
        numels = tuple(local_part(params[i]).numel() for i in layers)
        shards.append(ShardInfo(ranks=ranks, layers=tuple(layers), numels=numels, is_split=is_split))
    return tuple(shards)


def total_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of whole gradients. All processes must call it: the only collective of the monitor.

    A loop calls it by `Monitor.observe`, to clip with the norm.
    """
    squares: dict[Any, torch.Tensor] = {}
    for grad in grads:
        is_term = is_distributed(grad) and any(p.is_partial() for p in _placements(grad))
        whole: Any = grad
        part = whole.full_tensor() if is_term else local_part(grad)
        key = (whole.device_mesh, _split_dims(grad)) if is_distributed(grad) and not is_term else None
        square = torch.linalg.vector_norm(torch_reduce.stored_values(part), dtype=wide_dtype(part.device)).square()
        squares[key] = squares[key] + square.to(squares[key].device) if key in squares else square
    for key, square in squares.items():
        for dim in key[1] if key else ():
            torch.distributed.all_reduce(square, group=key[0].get_group(dim))
    device = grads[0].device if grads else torch.device("cpu")
    return torch.stack([square.to(device) for square in squares.values()]).sum().sqrt() if squares else torch.zeros(())


def _placements(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.placements)


def _split_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of its mesh over which a distributed tensor is split."""
    # `is_shard` is false for the strided shards of FSDP over tensor parallelism
    return tuple(i for i, p in enumerate(_placements(tensor)) if not (p.is_replicate() or p.is_partial()))


def _ranks(tensor: Any, dims: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks along some dimensions of a tensor's mesh, through this process."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    index = tuple(slice(None) if i in dims else coordinate[i] for i in range(mesh.ndim))
    return tuple(sorted(to_ints(mesh.mesh[index].flatten())))
