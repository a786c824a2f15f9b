"""One of two processes that train one model, sharded or replicated: watches the training and saves what was said."""

import torch
import torch.distributed as dist
from torch import nn

import gradwatch

STEPS = 100  # a budget is reviewed after 64


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicate(model):
    return nn.parallel.DistributedDataParallel(model)


def train(model, *, run=None, loss_fn=None, steps=STEPS, slow_rank=1):
    """Train on data of this rank's own, and return the monitor and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    with gradwatch.watch(model, optimizer, run=run, record=run is not None, loss_fn=loss_fn) as monitor:
        for _ in range(steps):
            x = torch.randn(12, 8, generator=draw)
            y = x.sum(1, keepdim=True)
            out = model(x)
            loss = (out - y).square().mean() if loss_fn is None else loss_fn(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=x)
            losses.append(float(loss.detach()))
            if dist.get_rank() == slow_rank:
                monitor.charge(10.0)  # as if watching took much of this rank's time, and of no other's
    return monitor, losses


def train_one(rank, folder, kind):
    """Train one kind of model on this rank, and return what was seen."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    wrap, _, asks = kind.partition("-")
    model = {"fsdp": shard, "ddp": replicate}[wrap](make_model())
    run = folder / "run" if asks == "run" else None
    monitor, losses = train(model, run=run, loss_fn=nn.MSELoss() if asks == "loss" else None)
    dist.barrier()
    return {
        "losses": losses,
        "findings": [finding.kind for finding in monitor.findings()],
        "events": [event.kind for event in monitor.history.events],
        "run_dir": str(monitor.run_dir),
        "steps": len(monitor.history["loss"]),
        "grad_L": monitor.history["grad.l2"][-1].tolist(),
        "ratio_TL": monitor.history["update.ratio"][::10].tolist(),
    }
