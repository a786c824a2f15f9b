"""Checks during training of TheDeepChecker.

Ben Braiek and Khomh, "Testing Feedforward Neural Networks Training Programs", 2022.

Source: thedeepchecker/thedeepchecker, deep_checker/config/settings.yaml (OverfitCheck) and deep_checker/hooks.py.
There the
checks run while a small batch is overfitted on purpose; here they run on the whole training. Checked from step 10 on,
every 10 steps:
    activations   dead: over half of the units have a 95th percentile of |a| below 1e-5 (ReLU and the like);
                  saturated: rho over 0.85 for over half of the units (sigmoid, tanh); spread: standard deviation
                  outside
                  [0.5, 2], F ratio over 2.70554
    weights       dead: over 95% below 1e-5; negative: over 95%; diverging: mean |w| over 1e8, or growing by 2 or more
                  in each of 4
                  successive steps
    gradients     vanishing: mean |g| below 1e-6, or falling to half or less in each of 4 successive steps; exploding:
                  over 1e6,
                  or growing by 2 or more in each of 4
    updates       mean of log10(mean |dw| / mean |w|) over 10 steps: above -1 too fast, below -4 too slow, 0 untrained
    loss          stagnant: falls by less than 5% in each of 4 successive periods of 10 steps; diverging: loss / best
                  loss doubles
                  in each of 4; fluctuating: smoothness of the last 50 periods below 0.5
    NaN or Inf    in weights, activations, gradients, loss
Only weights (two dimensions or more) are looked at for gradients and updates, as there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from scripts.fault_zoo.baselines.common import Baseline, finite, units, watch_modules, watch_steps

START, PERIOD, WINDOW = 10, 10, 5
SMOOTH = (nn.Sigmoid, nn.Tanh)
FIRING = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU)


def rho(x: Any, low: Any, high: Any, bins: Any = 50) -> Any:
    """Rakitianskaia & Engelbrecht's saturation measure, per column."""
    at = ((x - low) / (high - low) * bins).floor().clamp(0, bins - 1).long()
    out = []
    for column, where in zip(x.T, at.T, strict=False):
        count = torch.zeros(bins).index_add_(0, where, torch.ones_like(column))
        total = torch.zeros(bins).index_add_(0, where, column)
        mean = total / count.clamp(min=1)
        out.append(((2 * (mean - low) / (high - low) - 1).abs() * count).sum() / count.sum())
    return torch.stack(out)


class DeepChecker(Baseline):
    """Apply the checks of weights, gradients, updates, activations and loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch_steps(self)
        self.weights = [n for n, p in self.parameters.items() if p.ndim > 1 and p.requires_grad]
        self.before = {n: self.parameters[n].detach().clone() for n in self.weights}
        self.w_size: dict[str, list[float]] = {n: [] for n in self.weights}
        self.g_size: dict[str, list[float]] = {n: [] for n in self.weights}
        self.ratios: dict[str, list[float]] = {n: [] for n in self.weights}
        self.acts: dict[str, tuple[nn.Module, Tensor]] = {}
        self.period_losses: list[float] = []
        self.losses: list[float] = []
        self.best = math.inf
        watch_modules(self, (*SMOOTH, *FIRING), lambda n, m, i, o: self.acts.__setitem__(n, (m, o.detach())))

    def check(self, loss: float, val_loss: float | None) -> None:
        on = self.now >= START and self.now % PERIOD == 0
        self.check_loss(loss)
        for n in self.weights:
            w, g = self.parameters[n].detach(), self.grads.get(n)
            if not torch.isfinite(w).all():
                self.log.add("non-finite", n, self.now, "critical")
                continue
            self.w_size[n].append(w.abs().mean().item())
            if on:
                if (w.abs() < 1e-5).float().mean() > 0.95:
                    self.log.add("dead-layer", n, self.now)
                if (w < 0).float().mean() > 0.95:
                    self.log.add("poor-initialization", n, self.now)
                if self.w_size[n][-1] > 1e8 or self.rates(self.w_size[n], lambda r: r >= 2):
                    self.log.add("learning-rate-too-high", n, self.now)
            base = self.before[n].abs().mean().item()
            if base > 0:
                ratio = (w - self.before[n]).abs().mean().item() / base
                self.ratios[n].append(math.log10(ratio) if ratio > 0 else 0)
            if self.now and self.now % PERIOD == 0 and self.ratios[n]:
                mean = sum(self.ratios[n]) / len(self.ratios[n])
                self.ratios[n] = []
                kind = (
                    "not-optimized"
                    if mean == 0
                    else "learning-rate-too-high"
                    if mean > -1
                    else "learning-rate-too-low"
                    if mean < -4
                    else None
                )
                if kind:
                    self.log.add(kind, n, self.now)
            self.before[n] = w.clone()
            if g is None:
                continue
            if not torch.isfinite(g).all():
                self.log.add("non-finite", n, self.now, "critical")
                continue
            self.g_size[n].append(g.abs().mean().item())
            if on:
                if self.g_size[n][-1] < 1e-6 or self.rates(self.g_size[n], lambda r: r <= 0.5):
                    self.log.add("vanishing-gradient", n, self.now)
                if self.g_size[n][-1] > 1e6 or self.rates(self.g_size[n], lambda r: r >= 2):
                    self.log.add("exploding-gradient", n, self.now)
        self.grads = {}
        if on:
            for n, (m, a) in self.acts.items():
                if a.numel():
                    self.check_activation(n, m, units(a))
        self.acts = {}

    @staticmethod
    def rates(sizes: Any, test: Any) -> Any:
        recent = sizes[-WINDOW:]
        return len(recent) == WINDOW and min(recent) > 0 and all(test(b / a) for a, b in itertools.pairwise(recent))

    def check_activation(self, n: str, m: Any, a: Any) -> None:
        if not torch.isfinite(a).all():
            self.log.add("non-finite", n, self.now, "critical")
            return
        if isinstance(m, SMOOTH):
            low = -1.0 if isinstance(m, nn.Tanh) else 0.0
            if (rho(a, low, 1.0) > 0.85).float().mean() > 0.5:
                self.log.add("saturated-activation", n, self.now)
        elif (torch.quantile(a.abs()[:20000], 0.95, dim=0) < 1e-5).float().mean() > 0.5:
            self.log.add("dead-relu", n, self.now)
        spread = a.std(correction=0).item()
        bound = 0.5 if spread < 0.5 else 2.0 if spread > 2.0 else None
        if bound and max(spread, bound) ** 2 > 2.70554 * max(min(spread, bound), 1e-30) ** 2:
            self.log.add("poor-initialization", n, self.now)

    def check_loss(self, loss: float) -> None:
        if not finite(loss):
            self.log.add("non-finite", None, self.now, "critical")
            return
        self.period_losses.append(loss)
        if self.now % PERIOD:
            return
        self.losses.append(sum(self.period_losses) / len(self.period_losses))
        self.period_losses = []
        self.best = min(self.best, self.losses[-1])
        recent = self.losses[-WINDOW:]
        if len(recent) == WINDOW:
            if all((a - b) / a < 0.05 for a, b in itertools.pairwise(recent) if a):
                self.log.add("loss-plateau", None, self.now)
            if all(a and b / a >= 2 for a, b in itertools.pairwise(recent)):
                self.log.add("learning-rate-too-high", None, self.now)
        tail = self.losses[-50:]
        up = [b / a > 1 for a, b in itertools.pairwise(tail) if a]
        if len(tail) > 4 and 1 - sum(x != y for x, y in itertools.pairwise(up)) / len(tail) < 0.5:
            self.log.add("oscillating-gradient", None, self.now)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> DeepChecker:
    """Attach the tool to a script."""
    return DeepChecker(model, optimizer, **options)
