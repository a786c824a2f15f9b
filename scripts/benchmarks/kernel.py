"""What the kernel takes by itself, against one read of the same bytes, and what the monitor keeps in memory.

    python scripts/benchmarks/kernel.py [--rounds 20] [--only tiny,mlp] [--threads 1]

On the real gradients of each workload of `workloads.py`: all six statistics, and these with the histograms of a
sampled step at the default schedule, beside the time of `torch.dot` per tensor, which reads the same bytes once. Such a
step has a twentieth of the values, by whole tensors: gradients from the same read, weights from one of their own. Shown
are the mean of the twenty turns, the longest of them, and the first step of a run, which has all. Medians, interleaved
call by call.

Memory is that of all tensors and arrays that the monitor holds besides the model's own after a step that samples
everything, without the kept copy of the weights, which is there only where the optimizer is one that needs it. What
stands beside the model, on its device, is told apart from the history, which is in the host's memory: all statistics
of the newest steps, as many as a detector may ask for, with room for some more, up to as many again where rows are
small, and rows on their way there. Older ones add what thinning leaves of them.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from harness import interleaved, parse, parser
from torch import Tensor, nn
from workloads import WORKLOADS, loop

import gradwatch
from gradwatch.monitor import Schedule
from gradwatch.monitor.budget import histogram_slices
from gradwatch.probe.gradients.histograms import HistogramProbe, empty, shares
from gradwatch.probe.gradients.statistics import GradientProbe


def median_us(seconds: list[float]) -> float:
    """Return the median in microseconds."""
    return 1e6 * statistics.median(seconds)


def times(params: list[nn.Parameter], rounds: int) -> dict[str, float]:
    """Return the microseconds of one read, of all statistics, and of those with histograms."""
    grads = [p.grad.detach().flatten() for p in params if p.grad is not None]
    probe, counter = GradientProbe(params, kernel="native"), HistogramProbe(params, kernel="native")
    _, turns = histogram_slices(Schedule())
    turn = itertools.cycle(shares(params, turns))

    def with_histograms(among: slice) -> object:
        gradients_KB = empty(params[among])
        probe.read(counts_KB=gradients_KB, first=among.start)
        return counter.read(among, gradients_KB=gradients_KB)

    arms: dict[str, Callable[[], object]] = {
        "read": lambda: [torch.dot(g, g) for g in grads],
        "statistics": probe.read,
        "turns": lambda: with_histograms(next(turn)),
        "first": lambda: with_histograms(slice(0, len(params))),
    }
    seconds = interleaved(arms, rounds=rounds * turns)
    by_turn = [median_us(seconds["turns"][place::turns]) for place in range(turns)]
    us = {name: median_us(seconds[name]) for name in ("read", "statistics", "first")}
    return us | {"turn": statistics.mean(by_turn), "longest": max(by_turn)}


def held(root: Any, *, known: set[int]) -> Iterator[int]:
    """Yield the bytes of each tensor and array that hangs on an object, once each.

    Args:
        root: The object.
        known: Where the data of tensors begins that belong to others.
    """
    seen, waiting = set[int](), [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, nn.Module, torch.optim.Optimizer)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.device.type == "cpu" and thing.data_ptr() not in known:
                known.add(thing.data_ptr())
                yield thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            if thing.base is None and thing.ctypes.data not in known:
                known.add(thing.ctypes.data)
                yield thing.nbytes
        else:
            waiting += gc.get_referents(thing)


def memory(name: str) -> tuple[int, int, int]:
    """Return the bytes of a workload's parameters, those that the monitor holds beside them, and its history's."""
    of = loop(WORKLOADS[name])
    params = list(of.model.parameters())
    with gradwatch.watch(of.model, of.optimizer, schedule=Schedule(updates=1, activations=1)) as monitor:
        of.run(after=monitor.step)
        monitor.findings()
        others = {
            t.data_ptr() for p in params for t in (p, p.grad, *of.optimizer.state.get(p, {}).values()) if t is not None
        }
        collector = monitor._collector
        history = sum(held([monitor.pipeline, collector.fast_path], known=others))
        beside = sum(held(collector, known=others))
    return sum(p.nbytes for p in params), beside, history


def main() -> None:
    """Measure and print the table."""
    options = parse(parser(__doc__, WORKLOADS, rounds=20))
    print(
        "| gradients of | read, µs | six statistics, µs | by read | with histograms of a turn, by six statistics "
        "| the longest turn | the first step | memory beside | history |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.only:
        params_bytes, beside, history = memory(name)
        of = loop(WORKLOADS[name])
        x, y = next(of.batches)
        nn.functional.cross_entropy(of.model(x).flatten(0, -2), y.flatten()).backward()
        us = times(list(of.model.parameters()), options.rounds)
        read, six = us["read"], us["statistics"]
        print(
            f"| {WORKLOADS[name].title} | {read:,.0f} | {six:,.0f} | {six / read:.2f} | "
            f"{us['turn'] / six:.2f} | {us['longest'] / six:.2f} | {us['first'] / six:.2f} | "
            f"{beside / 2**10:,.0f} KiB, {beside / params_bytes:.2%} | "
            f"{history / 2**20:,.1f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
