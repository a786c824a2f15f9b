"""What a watched optimizer costs against torch's fused one that measures nothing.

    python scripts/benchmark_optim.py [--rounds 40] [--only tiny,mlp] [--threads 1] [--optimizer AdamW]

Both train the same model with the same loop, written by hand, without a monitor. The watched one writes at every step
the six statistics of every gradient; `+ updates` is that with weight norms and update/weight ratios as well.
Shown are a whole step, as the ratio to the loop with torch's optimizer in the same round, median and quartiles; and the
call of `step()` alone, with gradients that stay, as the least of many.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmark_watch import WORKLOADS, Loop, Workload, loop
from torch import Tensor

from gradwatch import optim

WARM_UP_S = 2.0
CALLS = 300
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}}


def torchs(kind: str, params: Any, lr: float) -> torch.optim.Optimizer:
    """Return torch's fused optimizer of a name."""
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(params, lr=lr, fused=True, **OPTIONS[kind])
    return made


def watched(kind: str, params: Any, lr: float, *, updates: bool) -> torch.optim.Optimizer:
    """Return the watched optimizer of a name, at work."""
    params = list(params)
    made: optim.Watched = getattr(optim, kind)(params, lr=lr, **OPTIONS[kind])
    row_SL: Tensor = torch.zeros(8, len(params))
    made.watch({p: i for i, p in enumerate(params)})
    made.gradients_SL, made.changes_2L = row_SL[:6], row_SL[6:] if updates else None
    return made


def timed(function: Callable[[], Any]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def least_step(one: Loop) -> float:
    """Return the least time of a call of the optimizer alone."""
    one.run()
    return min(timed(one.optimizer.step) for _ in range(CALLS))


def measure(workload: Workload, kind: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each arm's stretches, round by round, and those of its step alone."""
    arms = {
        "torch": loop(workload, partial(torchs, kind)),
        "watched": loop(workload, partial(watched, kind, updates=False)),
        "+ updates": loop(workload, partial(watched, kind, updates=True)),
    }
    for one in arms.values():
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP_S:
            one.run()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds):
        names = list(arms)
        for name in names[i % 3 :] + names[: i % 3]:
            seconds[name].append(timed(arms[name].run))
    return seconds, {name: least_step(one) for name, one in arms.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", choices=OPTIONS, default="AdamW")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("error", RuntimeWarning)  # a watched step that torch had to make is no watched step
    print(f"| step | torch's fused {options.optimizer}, ms | watched | + updates | step() alone of each, µs |")
    print("|---|---|---|---|---|")
    for name in options.only.split(","):
        workload = WORKLOADS[name]
        seconds, alone = measure(workload, options.optimizer, options.rounds)
        base = seconds["torch"]
        cells = [workload.title, f"{1e3 * statistics.median(base) / workload.stretch:.2f}"]
        for arm in ("watched", "+ updates"):
            low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds[arm], base, strict=True)], n=4)
            cells.append(f"{middle:.3f} [{low:.3f}-{high:.3f}]")
        cells.append(" / ".join(f"{1e6 * s:.0f}" for s in alone.values()))
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
