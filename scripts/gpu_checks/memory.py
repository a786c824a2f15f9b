"""Compare the planned peak of memory with that of the allocator of a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.config.load import load_config
from gradwatch.errors import GradwatchError
from gradwatch.models import gpt
from gradwatch.planning.training import ConfigPlanner
from gradwatch.records import DataSpec
from gradwatch.train.training_state import TrainingState
from scripts.gpu_checks.report import expect


def check_plan() -> None:
    """Compare the planned peak with that of the allocator."""
    for path in ("quickstart", "text-gpt", "text-gpt-fp16", "cifar10-resnet18"):
        with contextlib.suppress(GradwatchError):
            compare_plan(path)
    before = allocated()
    with torch.device("cuda"):
        model = gpt.build(
            DataSpec(input_shape=(1024,), outputs=50257, kind="tokens"), layers=12, heads=12, width=768
        ).train()
        x, y = torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(x)
        return nn.functional.cross_entropy(scores.float().flatten(0, -2), y.flatten())

    began = time.perf_counter()
    planned = gradwatch.plan(model, step, x, y, optimizer=optimizer)
    seconds = time.perf_counter() - began
    compare(
        "GPT-2 small, batch 8",
        planned,
        functools.partial(one_step, model, step, optimizer, x, y),
        seconds=seconds,
        before=before,
    )


def one_step(model: nn.Module, step: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make one step."""
    optimizer.zero_grad(set_to_none=True)
    step(x, y).backward()
    optimizer.step()


def two_layers(x: Tensor) -> Tensor:
    """Return a product with a bias of another one."""
    return nn.functional.linear(nn.functional.linear(x, x, x[0]), x, x[0])


def allocated() -> int:
    """Return what earlier parts have left, after the libraries have allocated the workspace that they keep.

    They keep some for products with and without a bias, and for each thread: a recomputed forward pass runs in that of
    the backward pass.
    """
    gc.collect()
    size = 256
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(size, size, dtype=dtype, device="cuda", requires_grad=True)
        # the second layer needs the output of the first, which is computed again
        for y in (x @ x, checkpoint(two_layers, x, use_reentrant=False)):
            y.sum().backward()
    del x, y
    torch.cuda.synchronize()
    print(f"        {torch.cuda.memory_allocated() / 1e6:.2f} MB are allocated before")
    return torch.cuda.memory_allocated()


def compare_plan(name: str) -> None:
    """Compare the plan of a shipped config."""

    def load(changes: Any) -> Any:
        settings = {"train.device": "cuda", "data.workers": 0, **changes}
        if name.startswith("cifar"):  # the digits as images with colors, which need no download
            settings |= {
                "data": {"name": "digits", "batch_size": 64, "transform": [{"Grayscale": {"num_output_channels": 3}}]}
            }
        return load_config(Path("configs") / f"{name}.yaml", [f"{k}={json.dumps(v)}" for k, v in settings.items()])

    before = allocated()
    config = load({})
    began = time.perf_counter()
    planned = ConfigPlanner(load).plan()
    seconds = time.perf_counter() - began
    training = TrainingState.build(config)
    batches = iter(training.batches.epoch(0))
    window = [next(batches) for _ in range(config.train.accumulate)]
    stepper = training.stepper(lambda: 1.0)
    compare(name, planned, lambda: stepper.run(window), seconds=seconds, before=before)


def compare(name: str, planned: Any, step: Callable[[], object], *, seconds: float, before: int) -> None:
    """Run three steps, and compare the peak of the allocator with the plan."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    peak = torch.cuda.max_memory_allocated() - before
    error = planned.peak_bytes / peak - 1
    text = f"{name}: planned {planned.peak_bytes / 1e6:.2f} MB in {seconds:.1f} s, allocated {peak / 1e6:.2f} MB"
    expect(abs(error) < 0.02, f"{text}, {100 * error:+.1f} %; parts {planned.to_json()['parts']}")
