"""One of two processes that share tensors: reads their statistics and saves what it saw."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def make_wholes():
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in [(5, 3), (7,), (4, 2), (3, 4), (1, 6), (6,)]]
    wholes[1][2] = torch.inf
    wholes[2].zero_()
    wholes[5][:3] = 0.0
    return wholes


def grad_of(weight):
    return 2 * weight + 1


def main(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from gradwatch.probe.gradients.histograms import HistogramProbe
    from gradwatch.probe.gradients.statistics import GradientProbe
    from gradwatch.probe.updates.from_copy import CopyUpdateProbe

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    places = [[Shard(0)], [Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], None]
    params = []
    for whole, place in zip(make_wholes(), places, strict=True):
        params.append(torch.nn.Parameter(whole if place is None else distribute_tensor(whole, mesh, place)))
        params[-1].grad = grad_of(params[-1]).detach()
    row_SL = GradientProbe(params).read().numpy()
    counts_LB = HistogramProbe(params).read()[0].numpy()
    updates = CopyUpdateProbe(params)
    updates.before()
    with torch.no_grad():
        for param in params:
            param.sub_(0.1 * param.grad)
    np.savez(folder / f"{rank}.npz", row_SL=row_SL, change_2L=updates.after().numpy(), counts_LB=counts_LB)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # gloo's threads may let go of their last tensor while Python shuts down, which ends it with SIGABRT now and then:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(0)
