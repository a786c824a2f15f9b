"""Wrap a model for several ranks with the engines of torch: DistributedDataParallel and fully_shard."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gradwatch.config.sections.train import TrainSection
from gradwatch.errors import GradwatchError
from gradwatch.train.blocks import outermost_containers
from gradwatch.train.parallel.ranks import Ranks

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(model: nn.Module, train: TrainSection, *, ranks: Ranks, device: torch.device) -> nn.Module:
    """Return the module that the forward pass calls.

    With DDP it is a wrapper of the model. FSDP2 and HSDP change the model in place, so that its parameters become
    DTensors: build the optimizer afterwards.

    Args:
        model: The model, on its device. All ranks take the weights of rank 0.
        train: The config's section.
        ranks: The ranks of the training.
        device: Device of this rank.
    """
    if train.sync_batchnorm:
        if device.type == "cpu":
            raise GradwatchError("train.sync_batchnorm: SyncBatchNorm of torch needs a GPU, and the device is cpu")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if train.parallel == "ddp":
        return DistributedDataParallel(model)
    _shard(model, train, ranks=ranks, device=device)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper that `parallelize` returned."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronizing(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-batch, in which the gradients are averaged only after the last of a step.

    Args:
        model: The module that `parallelize` has returned, or the model of one process, which has no average.
        is_last: Whether the micro-batch is the last one of its step.
    """
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else model.no_sync()
    if synchronize := getattr(model, "set_requires_gradient_sync", None):  # of FSDPModule, which fully_shard has added
        synchronize(is_last)
    return contextlib.nullcontext()


def _shard(model: nn.Module, train: TrainSection, *, ranks: Ranks, device: torch.device) -> None:
    # imported here: only sharding needs them, and they are slow to import
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)  # as DistributedDataParallel does
    if train.parallel == "hsdp":
        shard_ranks = train.shard_ranks or ranks.launched.local_world_size
        shape = (ranks.world_size // shard_ranks, shard_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    # autocast stays on and chooses the format of each operation; the policy only says how weights are gathered
    policy = MixedPrecisionPolicy(
        param_dtype=HALF.get(train.precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, _BatchNorm) and any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh, mp_policy=whole)  # its statistics are float32, so its weights must be
    containers = [model] if isinstance(model, nn.Sequential) else outermost_containers(model)
    for container in containers:
        for block in container:
            if any(True for _ in block.parameters()) and not isinstance(block, _BatchNorm):
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if any(True for _ in model.buffers()):
        # buffers are not sharded: as with DistributedDataParallel, each forward pass begins with the buffers of rank 0
        model.register_forward_pre_hook(_broadcast_buffers)


@torch.no_grad()
def _broadcast_buffers(model: nn.Module, args: Any) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
