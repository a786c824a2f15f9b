"""Watch captured, compiled and distributed steps, and run the commands on a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from scripts.gpu_checks.report import expect, largest_error
from scripts.gpu_checks.trainings import Net, kinds


def check_graph() -> None:
    """Compare a captured watched step with the eager one."""
    norms = {}
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, fused=True)
        x, y = torch.randn(40, 64, 64, device="cuda"), torch.randint(8, (40, 64), device="cuda")
        here, there = x[0].clone(), y[0].clone()
        monitor = gradwatch.watch(model, optimizer, on_finding=None)

        def step(
            model: nn.Module = model, optimizer: Any = optimizer, here: Tensor = here, there: Any = there
        ) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(here), there)
            loss.backward()
            optimizer.step()
            return loss

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                monitor.step(step(), batch=here)
        torch.cuda.current_stream().wait_stream(side)
        if is_captured:
            with torch.cuda.graph(graph):
                loss = step()
        for i in range(5, 40):
            here.copy_(x[i])
            there.copy_(y[i])
            if is_captured:
                graph.replay()
            else:
                loss = step()
            monitor.step(loss, batch=here)
        monitor.close()
        steps_T, run_TS1 = monitor.history.run.rows()
        column = monitor.history.run.statistics.index("grad_norm.before_clip")
        norms[is_captured] = run_TS1[:, column, 0]
        print(f"        {len(steps_T)} rows, left out {[*monitor.attempts.left_out]}, {kinds(monitor)}")
    expect(largest_error(norms[True], norms[False]) < 1e-5, "norms of captured steps are those of eager steps")


def check_compiled() -> None:
    """Train a network with convolutions and one without under torch.compile, with and without watching."""
    torch.backends.cudnn.deterministic = True
    for make, shape in ((Net, (3, 12, 12)), (dense, (64,))):
        first, second, watched = (trained_compiled(make, shape, is_watched=i == 2) for i in range(3))
        same, other = (
            max(float((a - b).abs().max()) for a, b in zip(first, ended, strict=True)) for ended in (second, watched)
        )
        # a training that differs from itself says nothing about watching
        text = f"{make.__name__}, compiled: largest difference without watching {same:.1e}, with it {other:.1e}"
        expect(other == 0 or same > 0, text)


def dense() -> nn.Module:
    """Return a network whose kernels add in the same order each time."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 10))


def trained_compiled(make: Callable[[], nn.Module], shape: tuple[int, ...], *, is_watched: bool) -> list[Tensor]:
    """Return the weights of a compiled network after some steps."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    monitor = gradwatch.watch(model, optimizer, on_finding=None) if is_watched else None
    forward = torch.compile(model)
    for _ in range(25):
        x, y = torch.randn(32, *shape, device="cuda"), torch.randint(10, (32,), device="cuda")
        loss = nn.functional.cross_entropy(forward(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor:
            monitor.step(loss, batch=x)
    if monitor:
        monitor.close()
        acts = monitor.history.act.rows()[1]
        print(f"        activations {acts.shape}, {np.isfinite(acts[:, 2]).mean():.0%} of the means are numbers")
        expect(not monitor.attempts.left_out, f"left out {[*monitor.attempts.left_out]}")
    return [p.detach().clone() for p in model.parameters()]


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "160"}


def command(*words: str, folder: Path) -> tuple[int, str]:
    """Run gradwatch, and return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "gradwatch", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def check_config() -> None:
    """Train a shipped config on CUDA, resume it, and replay a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = str(Path.cwd() / "configs/quickstart.yaml")
        on_cuda = ["--set", "train.device=cuda", "--set", "run.deterministic=true", "--set", "train.epochs=4"]
        code, out = command("train", config, *on_cuda, "--set", "run.name=whole", folder=folder)
        expect(code == 0, f"gradwatch train: exit code {code}, {out.strip().splitlines()[-3:]}")
        (whole,) = (folder / "runs").glob("whole*")
        for step in ("3", "60"):
            code, out = command("replay", str(whole), "--step", step, folder=folder)
            expect(code == 0, f"gradwatch replay --step {step}: exit code {code}, {out.strip().splitlines()[:4]}")
        words = [sys.executable, "-m", "gradwatch", "train", config, *on_cuda, "--set", "run.name=cut"]
        child = subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 40
        while not [*(folder / "runs").glob("cut*/checkpoints/*")] and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        child.communicate()
        (cut,) = (folder / "runs").glob("cut*")
        code, out = command("train", "--resume", str(cut), folder=folder)
        expect(child.returncode == 3 and code == 0, f"interrupted with {child.returncode}, resumed: exit code {code}")
        histories = [gradwatch.load_run(run).history for run in (whole, cut)]
        for table in ("param", "act"):
            tables = [getattr(history, table).rows() for history in histories]
            is_same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*tables, strict=True))
            expect(is_same, f"resumed: the table {table} of {tables[0][1].shape} is that of the whole run")


def check_ranks() -> None:
    """Watch DDP and FSDP2 by NCCL."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
        if kind == "fsdp":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        forward = DistributedDataParallel(model) if kind == "ddp" else model
        with (
            tempfile.TemporaryDirectory() as folder,
            gradwatch.watch(model, optimizer, run=f"{folder}/run", on_finding=None) as monitor,
        ):
            for _ in range(40):
                x = torch.randn(64, 64, device="cuda")
                loss = nn.functional.cross_entropy(forward(x), x[:, :8].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=x)
            monitor.close()
            norms = monitor.history.run.rows()[1][:, monitor.history.run.statistics.index("grad_norm.before_clip"), 0]
            left_out = [*monitor.attempts.left_out]
            is_right = len(norms) == 40 and bool(np.isfinite(norms).all()) and not left_out
            expect(is_right, f"{kind}: {len(norms)} rows, left out {left_out}, {kinds(monitor)}")
    torch.distributed.destroy_process_group()
