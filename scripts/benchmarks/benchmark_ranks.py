"""What watching costs on several ranks: time ratio of watched steps to bare ones, under DDP and FSDP2.

    python scripts/benchmarks/benchmark_ranks.py [--rounds 30] [--only ddp,fsdp] [--ranks 2] [--steps 24] [--threads 1]

The ranks are processes of this machine that exchange gradients through gloo. Every rank trains the same model bare,
bare once more, and watched at the defaults. Each round trains a stretch of steps of all three, in an order that
changes; a stretch ends when all ranks have trained it. Shown is the median ratio of the same round with its quartiles:
the second bare loop tells the noise of the machine. Give every rank a core of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import interleaved, parse, parser, prepare, ratio, timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from workloads import blocks

import gradwatch

WIDTH, DEPTH, BATCH, OUTPUTS = 512, 8, 256, 10
KINDS = ("ddp", "fsdp")
ARMS = ("bare", "again", "watched")


class Loop:
    """A training of one model on all ranks, by hand or watched.

    Args:
        kind: How the ranks share the model.
        run: Run directory, or None for a bare loop.
    """

    def __init__(self, kind: str, run: Path | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = blocks(DEPTH, WIDTH)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.children():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.monitor = None if run is None else gradwatch.watch(self.model, self.optimizer, run=run, on_finding=None)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def stretch(self, steps: int) -> None:
        """Train some steps, until all ranks have trained them."""
        for _ in range(steps):
            x = torch.randn(BATCH, WIDTH, generator=self.data)
            loss = (self.model(x) - x[:, :OUTPUTS].sin()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.monitor is not None:
                self.monitor.step(loss, batch=x)
        dist.barrier()


def measure(kind: str, options: argparse.Namespace, folder: Path) -> str:
    """Return the row of the table for one way to share a model."""
    loops = {arm: Loop(kind, folder / kind if arm == "watched" else None) for arm in ARMS}
    arms: dict[str, Callable[[], None]] = {arm: partial(loop.stretch, options.steps) for arm, loop in loops.items()}
    for _ in range(3):  # all ranks alike: a clock would end at another step on each
        for arm in arms.values():
            arm()
    step_ms = 1e3 * min(timed(arms["bare"]) for _ in range(3)) / options.steps
    seconds = interleaved(arms, rounds=options.rounds)
    monitor = loops["watched"].monitor
    assert monitor is not None, "only the other loops are bare"
    monitor.close()
    cells = [ratio(seconds[arm], seconds["bare"], has_error=True) for arm in ARMS[1:]]
    return f"| {kind} | {step_ms:.1f} | {' | '.join(cells)} |"


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank. Rank 0 prints the table."""
    prepare(options)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=options.ranks)
    if rank == 0:
        print(f"| {options.ranks} ranks, MLP {DEPTH} x {WIDTH}, batch {BATCH} | ms | bare again | watched |")
        print("|---|---|---|---|", flush=True)
    for kind in options.only:
        row = measure(kind, options, Path(folder))
        if rank == 0:
            print(row, flush=True)
    dist.barrier()
    # gloo's threads may end the process while it shuts down
    os._exit(0)


def main() -> None:
    """Start the ranks and wait for them."""
    of = parser(__doc__, KINDS, rounds=30)
    of.add_argument("--ranks", type=int, default=2)
    of.add_argument("--steps", type=int, default=24, help="steps of a stretch")
    options = parse(of)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (options, folder), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
