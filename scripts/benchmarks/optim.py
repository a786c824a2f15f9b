"""What a watched optimizer costs against torch's fused one that measures nothing.

    python scripts/benchmarks/optim.py [--rounds 40] [--only tiny,mlp] [--threads 1] [--optimizer AdamW]

Both train the same model with the same loop, written by hand, without a monitor. The watched one writes at every step
the six statistics of every gradient; `+ updates` is that with weight norms and update/weight ratios as well.
Shown are the call of `step()` alone, with gradients that stay, and a whole step, each as the ratio to torch's optimizer
in the same round, median and quartiles.
"""

from __future__ import annotations

import statistics
import warnings
from functools import partial
from typing import Any

import torch
from harness import Seconds, interleaved, parse, parser, ratio, warm_up
from torch import Tensor
from workloads import WORKLOADS, Workload, loop

from gradwatch import optim

WARM_UP_S = 2.0
CALLS = 100
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}}


def torchs(kind: str, params: Any, lr: float) -> torch.optim.Optimizer:
    """Return torch's fused optimizer of a name."""
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(params, lr=lr, fused=True, **OPTIONS[kind])
    return made


def watched(kind: str, params: Any, lr: float, *, updates: bool) -> torch.optim.Optimizer:
    """Return the watched optimizer of a name, at work."""
    params = list(params)
    made: optim.InstrumentedOptimizer = getattr(optim, kind)(params, lr=lr, **OPTIONS[kind])
    row_SL: Tensor = torch.zeros(8, len(params))
    made.watch({p: i for i, p in enumerate(params)})
    made.gradients_SL, made.changes_2L = row_SL[:6], row_SL[6:] if updates else None
    return made


def measure(workload: Workload, kind: str, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of each arm's calls of `step()`, and of its stretches, round by round."""
    arms = {
        "torch": loop(workload, partial(torchs, kind)),
        "watched": loop(workload, partial(watched, kind, updates=False)),
        "+ updates": loop(workload, partial(watched, kind, updates=True)),
    }
    stretches = {name: one.run for name, one in arms.items()}
    warm_up(stretches.values(), seconds=WARM_UP_S)
    alone = interleaved({name: one.optimizer.step for name, one in arms.items()}, rounds=CALLS)
    return alone, interleaved(stretches, rounds=rounds)


def cells(seconds: Seconds, *, steps: int) -> list[str]:
    """Return the milliseconds of a step of torch's, and the ratios of the others to it."""
    base = seconds["torch"]
    return [
        f"{1e3 * statistics.median(base) / steps:.3g}",
        *(ratio(seconds[arm], base) for arm in ("watched", "+ updates")),
    ]


def main() -> None:
    """Measure and print the table."""
    asked = parser(__doc__, WORKLOADS, rounds=40)
    asked.add_argument("--optimizer", choices=OPTIONS, default="AdamW")
    options = parse(asked)
    warnings.simplefilter("error", RuntimeWarning)  # a watched step that torch had to make is no watched step
    print(
        f"| | step() of torch's fused {options.optimizer}, ms | watched | + updates | whole, ms | watched | + updates |"
    )
    print("|---" * 7 + "|")
    for name in options.only:
        workload = WORKLOADS[name]
        alone, whole = measure(workload, options.optimizer, options.rounds)
        row = [workload.title, *cells(alone, steps=1), *cells(whole, steps=workload.stretch)]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
