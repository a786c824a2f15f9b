"""The textbook patterns, as a person would write them down in an afternoon.

Per parameter, from the L2 norm and the zero share of its gradient as the optimizer gets it:
    norms climb exponentially        over a window of 20 steps: log norm rises by >= 0.1 per step with r^2 >= 0.8,
                                     or a norm over 1e3                                        -> exploding-gradient
    norms bounce                     coefficient of variation over the window > 1.0            -> oscillating-gradient
    norms frozen at a tiny value     mean < 1e-6 and coefficient of variation < 0.05           -> dead-layer
    sparsity creeps upward           zero share over 50 steps: later half above earlier half by 0.1, ends over 0.5,
                                     and rises in most fifths of the window                    -> rising-sparsity
    spike                            norm > 100 times the median of the last 50                -> gradient-spike
    one layer 1000 times larger      median norm over the window > 1000 times the median of the layers ->
                                     layer-imbalance
And, since anyone would: NaN or Inf in loss or gradient -> non-finite; a trainable parameter without gradient for the
first 20 steps -> no-gradient.

The first two and the last thresholds (100x, 1000x) are the ones named in the task; the others are common round numbers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import torch
from torch import nn

from scripts.fault_zoo.baselines.common import Baseline, finite, watch_steps

WINDOW, LONG = 20, 50
SLOPE, FIT, HUGE = 0.1, 0.8, 1e3
BOUNCE, TINY, STILL = 1.0, 1e-6, 0.05
RISE, HIGH = 0.1, 0.5
SPIKE, IMBALANCE = 100.0, 1000.0


def line(ys: Any) -> Any:
    n = len(ys)
    mx, my = (n - 1) / 2, sum(ys) / n
    sxx = sum((i - mx) ** 2 for i in range(n))
    sxy = sum((i - mx) * (y - my) for i, y in enumerate(ys))
    syy = sum((y - my) ** 2 for y in ys)
    return sxy / sxx, (sxy * sxy / (sxx * syy) if syy > 0 else 0.0)


class SeedRules(Baseline):
    """Apply the textbook patterns to each parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch_steps(self)
        self.norms: dict[str, list[float]] = {n: [] for n, p in self.parameters.items() if p.requires_grad}
        self.zeros: dict[str, list[float]] = {n: [] for n in self.norms}

    def check(self, loss: float, val_loss: float | None) -> None:
        if not finite(loss):
            self.log.add("non-finite", None, self.now, "critical")
        for n, g in self.grads.items():
            if n not in self.norms:
                continue
            norm = g.float().norm().item()
            if not math.isfinite(norm):
                self.log.add("non-finite", n, self.now, "critical")
                continue
            past = self.norms[n]
            if len(past) >= WINDOW:
                usual = statistics.median(past[-LONG:])
                if usual > 0 and norm > SPIKE * usual:
                    self.log.add("gradient-spike", n, self.now)
            past.append(norm)
            self.zeros[n].append((g == 0).float().mean().item())
            if len(past) >= WINDOW:
                self.look(n, past[-WINDOW:])
            if len(past) >= LONG and self.now % 10 == 0:
                self.sparsity(n, self.zeros[n][-LONG:])
        self.grads = {}
        if self.now == WINDOW - 1:
            for n, past in self.norms.items():
                if not any(past):
                    self.log.add("no-gradient", n, self.now)
        if self.now >= WINDOW - 1 and self.now % 10 == 9:
            typical = {n: statistics.median(p[-WINDOW:]) for n, p in self.norms.items() if len(p) >= WINDOW}
            if len(typical) > 2:
                middle = statistics.median(typical.values())
                for n, value in typical.items():
                    if middle > 0 and value > IMBALANCE * middle:
                        self.log.add("layer-imbalance", n, self.now)

    def look(self, n: str, recent: Any) -> None:
        mean = sum(recent) / WINDOW
        spread = statistics.pstdev(recent)
        if recent[-1] > HUGE:
            self.log.add("exploding-gradient", n, self.now, "critical")
        elif min(recent) > 0:
            slope, fit = line([math.log(x) for x in recent])
            if slope >= SLOPE and fit >= FIT:
                self.log.add("exploding-gradient", n, self.now)
        if mean < TINY:
            if spread <= STILL * mean:
                self.log.add("dead-layer", n, self.now)
        elif spread > BOUNCE * mean:
            self.log.add("oscillating-gradient", n, self.now)

    def sparsity(self, n: str, share: Any) -> None:
        fifths = [sum(share[i : i + 10]) / 10 for i in range(0, LONG, 10)]
        early, late = sum(share[:25]) / 25, sum(share[25:]) / 25
        if late - early > RISE and fifths[-1] > HIGH and sum(b > a for a, b in itertools.pairwise(fifths)) >= 3:
            self.log.add("rising-sparsity", n, self.now)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> SeedRules:
    """Attach the tool to a script."""
    return SeedRules(model, optimizer, **options)
