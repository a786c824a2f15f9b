"""How the cost of watching grows: with the bytes of the gradients, with the number of tensors, with the steps of a run.

    python scripts/benchmarks/growth.py [--picture .github/pictures/growth.svg] [--steps 100000]

The first two are the time of one read of all gradients, median of many, beside that of `torch.dot` per tensor, which
reads the same bytes once. The third is what the monitor takes per step, its thread included, over a run of 100,000
steps of a model of 20 tensors, or as many as asked for: the mean of each 25th.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gradwatch
from gradwatch.probe.gradients.statistics import GradientProbe

BYTES = [2**k for k in range(16, 29, 2)]
TENSORS = [1, 4, 16, 64, 256, 1024, 4096]
READ = 250
"""Steps after which the newest are read: more are not all in the history."""
POINTS = 25
"""Stretches of the long run of which the mean is drawn: each has some turns of the monitor's thread."""


def parameters(num: int, size: int) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    params = [nn.Parameter(torch.zeros(size)) for _ in range(num)]
    for p in params:
        p.grad = torch.randn(size)
    return params


def median_us(function: Callable[[], object], *, budget_s: float = 0.5) -> float:
    """Return the median time of a call, in microseconds."""
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 7:
        began = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def reading(num: int, size: int) -> tuple[float, float]:
    """Return the time of all statistics, and that of `dot`, for so many tensors of a size."""
    params = parameters(num, size)
    probe = GradientProbe(params)
    flat = [p.grad.view(-1) for p in params if p.grad is not None]
    return median_us(probe.read), median_us(lambda: [torch.dot(g, g) for g in flat])


def running(steps: int) -> list[float]:
    """Return what the monitor takes per step, in microseconds, in each stretch of a long run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.randn(256, 8, 16)
    seen: list[float] = []
    with gradwatch.watch(model, optimizer) as monitor:
        for step in range(steps):
            loss = model(batches[step % 256]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if step % READ == READ - 1:
                seen += monitor.history.scalar("watch_ms", READ).tolist()
    return [1e3 * float(np.mean(stretch)) for stretch in np.array_split(seen, POINTS)]


def draw(
    by_bytes: list[tuple[float, float]],
    by_tensors: list[tuple[float, float]],
    by_step: list[float],
    *,
    steps: int,
    path: Path,
) -> None:
    """Draw all three."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axes, xs, pairs, label in (
        (left, BYTES, by_bytes, "bytes of gradients, in 16 tensors"),
        (middle, TENSORS, by_tensors, "tensors of 1,024 elements"),
    ):
        axes.loglog(xs, [all_six for all_six, _ in pairs], "o-", label="all six statistics")
        axes.loglog(xs, [dot for _, dot in pairs], "s--", color="gray", label="torch.dot per tensor")
        axes.set(xlabel=label, ylabel="one read, µs")
        axes.legend(frameon=False)
    right.plot([steps * (i + 1) / POINTS for i in range(POINTS)], by_step)
    right.set(xlabel="step of the run", ylabel="watching, µs a step", ylim=(0, 2 * max(by_step)))
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    """Measure, print, and draw where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="where to draw it; needs matplotlib")
    parser.add_argument("--steps", type=int, default=100_000, help="length of the long run; at least 10,000")
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_bytes = [reading(16, size // 4 // 16) for size in BYTES]
    by_tensors = [reading(num, 1024) for num in TENSORS]
    by_step = running(options.steps)
    for title, xs, pairs in (("bytes", BYTES, by_bytes), ("tensors", TENSORS, by_tensors)):
        print(f"| {title} | all six statistics, µs | torch.dot, µs | ratio |\n|---|---|---|---|")
        for x, (all_six, dot) in zip(xs, pairs, strict=True):
            print(f"| {x:,} | {all_six:,.1f} | {dot:,.1f} | {all_six / dot:.2f} |")
    fifth = POINTS // 5
    early, late = statistics.fmean(by_step[:fifth]), statistics.fmean(by_step[-fifth:])
    print(f"watching, a step: {early:.0f} µs in the first fifth of {options.steps:,} steps, {late:.0f} µs in the last")
    if options.picture:
        draw(by_bytes, by_tensors, by_step, steps=options.steps, path=options.picture)


if __name__ == "__main__":
    main()
