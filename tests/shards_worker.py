"""Four processes that train sharded models in turn, with and without a monitor, and of which one dies."""

import os
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradwatch
from gradwatch.pipeline import pipeline
from gradwatch.pipeline.ranks import shards

STEPS = 4
SAMPLES = 24
"""Samples of a step, over all ranks."""
SCHEDULE = gradwatch.Schedule(updates=1, activations=1, histograms=2, budget=0.0)
LOST = 10
"""First step that one rank does not write."""
END_S = 1.0
"""Time for which the end of a run waits for the other ranks, in this test."""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))


def make_optimizer(kind, params):
    """Return AdamW for one kind only: DTensor plans each of its many operations for each shape, which takes seconds."""
    if kind == "fsdp":
        return torch.optim.AdamW(params, lr=0.01)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train(model, kind, *, run=None, share=slice(None), is_watched=True):
    """Train on a share of each batch, with clipping, and return the monitor."""
    optimizer = make_optimizer(kind, model.parameters())
    monitor = watch(model, optimizer, run) if is_watched else None
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x[share]) - x[share, :4].sin()).square().mean()
        loss.backward()
        if monitor is not None and kind == "fsdp":
            monitor.observe(needs_norm=False)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        if monitor is not None:
            monitor.step(loss, batch=x[share], grad_norm=norm)
    if monitor is not None:
        monitor.close()
    return monitor


def watch(model, optimizer, run):
    sinks = {"html": {"enabled": False}, "tensorboard": {"enabled": False}}
    return gradwatch.watch(model, optimizer, run=run, schedule=SCHEDULE, on_finding=None, sinks=run and sinks)


def fsdp(mesh):
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "3": SequenceParallel(sequence_dim=0),
        "5": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(make_model(), mesh, plan)


def fsdp_over_tensor_parallel(mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(tensor_parallel(mesh["inner"]), mesh=mesh["outer"])


def train_all(rank, folder, mesh):
    """Train each kind of model unwatched and watched, and return the number of collectives of each training."""
    quarter, half = SAMPLES // 4, SAMPLES // 2
    halves = [slice(0, half), slice(half, SAMPLES)]
    kinds = {
        "fsdp": (lambda: fsdp(mesh["inner"]), halves[rank % 2]),  # ranks 2 and 3 train a replica of their own
        "hsdp": (lambda: fsdp(mesh), slice(quarter * rank, quarter * (rank + 1))),
        "fsdp-tp": (lambda: fsdp_over_tensor_parallel(mesh), halves[rank // 2]),
        "tp": (lambda: tensor_parallel(mesh["inner"]), slice(None)),
    }
    counts = {}
    for kind, (make, share) in kinds.items():
        for is_watched in (False, True):
            before = count_collectives(mesh)
            train(make(), kind, run=folder / kind, share=share, is_watched=is_watched)
            counts[f"{kind} {is_watched}"] = (count_collectives(mesh) - before).tolist()
            dist.barrier()
    return counts


def count_collectives(mesh):
    groups = [dist.distributed_c10d._get_default_group(), mesh.get_group(0), mesh.get_group(1)]
    return np.array([group._get_sequence_number_for_group() for group in groups])


def train_locally(rank, run, mesh, *, lose):
    """Move a sharded weight by gradients that need no other rank, and return how the run went on rank 0.

    Args:
        lose: Called on rank 1 with the monitor at step `LOST`; returns whether rank 1 ends.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 16, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(16, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    monitor = watch(model, optimizer, run)
    for step in range(2 * LOST):
        if rank == 1 and step == LOST and lose(monitor):
            break
        model.weight.grad = torch.full_like(model.weight, rank + 1)
        optimizer.step()
        monitor.step(1.0)
    began = time.monotonic()
    monitor.close()
    return {
        "close_s": time.monotonic() - began,
        "norms": monitor.history["grad_norm.before_clip"].tolist(),
        "events": [event.to_json() for event in monitor.history.events if event.kind.startswith("shards")],
    }


def lose_ranks(rank, folder, mesh):
    """Train while rank 1 ends early, does not watch, stalls, and dies; return how each run went on rank 0."""
    pipeline.MAX_END_S = END_S
    went = {"ended": train_locally(rank, folder / "ended", mesh, lose=lambda _: True)}

    def stall(monitor):
        monitor.history  # noqa: B018 - writes the steps so far
        while not (folder / "over").exists():
            time.sleep(0.05)

    def die(monitor):
        monitor.history  # noqa: B018
        os.kill(os.getpid(), signal.SIGKILL)

    went["stalled"] = train_locally(rank, folder / "stalled", mesh, lose=stall)
    if rank == 0:
        (folder / "over").touch()
    went["killed"] = train_locally(rank, folder / "killed", mesh, lose=die)
    if rank == 0:
        shards.STALLED_S = 0.1
        went["alone"] = watch_alone(folder, mesh)
    return went


def watch_alone(folder, mesh):
    """Watch on one rank only, and return the number of steps that its history shows before the run is closed."""
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Linear(4, 16, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, folder / "alone") as monitor:
        model.weight.grad = torch.full_like(model.weight, 1.0)
        optimizer.step()
        monitor.step(1.0)
        until_s = time.monotonic() + 10
        while not len(monitor.history["loss"]) and time.monotonic() < until_s:
            time.sleep(0.05)
        return len(monitor.history["loss"])


def train_and_lose(rank, folder):
    """Train on four ranks, then lose rank 1; return the collectives of each training, and how rank 0 went on."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {"collectives": train_all(rank, folder, square), "lost": lose_ranks(rank, folder, line)}
