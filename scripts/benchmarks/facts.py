"""Measure what reading the graph and modes costs: a step that reads the graph, and one that does not."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from gradwatch.probe.inspections import Inspections
from gradwatch.probe.parameters import list_parameters


def model_of(layers: int) -> nn.Module:
    """Return a stack of blocks with dropout and batch normalisation, four parameter tensors each."""
    blocks = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        for _ in range(max(1, layers // 4))
    ]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


def median_us(call: Callable[[], object], *, times: int) -> float:
    """Return the median time of a call in microseconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def measure(tensors: int) -> str:
    """Return a line of the table for a model of so many parameter tensors."""
    model = model_of(tensors)
    params, layers = list_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loss = F.cross_entropy(model(torch.randn(16, 8)), torch.arange(16) % 3)
    loss.backward()

    def look() -> None:
        facts = Inspections(model, params=params, layers=layers, optimizers=[])
        facts.read(loss, step=0, is_validated=False, is_non_finite=False)
        facts.close()

    alone = median_us(optimizer.step, times=200)
    facts = Inspections(model, params=params, layers=layers, optimizers=[optimizer])

    def step() -> None:
        optimizer.step()
        facts.read(loss, step=100, is_validated=False, is_non_finite=False)

    return f"| {len(params)} | {median_us(look, times=10) / 1e3:.1f} | {median_us(step, times=200) - alone:.1f} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="*", default=[20, 200, 1000])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| parameter tensors | reading the graph, ms | any later step, us |\n|---|---|---|")
    for tensors in parser.parse_args().tensors:
        print(measure(tensors))


if __name__ == "__main__":
    main()
