"""AUTOTRAINER (Zhang, Zhai, Ma, Shen, ICSE 2021): five training problems and their thresholds.

Source: shiningrain/AUTOTRAINER, AutoTrainer/utils/monitor.py and utils.py (default_param), reproduce.py
(determine_threshold=1,
a check every 3 epochs). The problems and the symptoms there:
    vanishing gradient     ||g_first|| / ||g_last|| < beta1 = 1e-3 and ||g_first|| < beta2 = 1e-4
    exploding gradient     ||g_first|| / ||g_last|| > beta3 = 70, or NaN/Inf in loss, gradients or weights; a loss
                           over 1e3 is as bad
    dying ReLU             gamma = 70% or more of all gradient entries are zero
    oscillating loss       accuracy swings of zeta = 0.03 or more in eta = 20% or more of the epochs
    slow convergence       accuracy never above Theta = 0.6 and never up by delta = 0.01 from one epoch to the next

A gradient problem is only reported when training goes badly: accuracy never above Theta, or no rise by delta
(judge_issue). Judged once 30% of the planned epochs, less the check interval, are over.

Adaptation to a loop that has neither epochs nor accuracy:
  * an epoch is 10 optimizer steps; the run is taken to be planned for 20 epochs, so judging starts after epoch 3;
  * accuracy is replaced by progress = 1 - loss / first epoch's loss, cut to [0, 1] (for a loss that starts at or below
    zero there is no progress measure and only NaN/Inf is judged);
  * the gradients are those of the step at hand, as the optimizer sees them, instead of those of a fixed first batch.
`attach` keeps the gate on bad training; `attach_ungated` reports each symptom wherever it is seen.
Kinds: vanish, explode, relu, unstable, not_converge -> vanishing-gradient, exploding-gradient, dead-relu,
learning-rate-too-high ("loss rises or bounces"), loss-plateau; NaN/Inf -> non-finite.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from scripts.fault_zoo.baselines.common import Baseline, finite, watch_steps

BETA1, BETA2, BETA3, GAMMA = 1e-3, 1e-4, 70.0, 0.7
ZETA, ETA, DELTA, THETA, LARGE_LOSS = 0.03, 0.2, 0.01, 0.6, 1e3
EPOCH, EPOCHS, GAP, JUDGE = 10, 20, 3, 0.3


class AutoTrainer(Baseline):
    """Look for the five training problems at the end of each third epoch."""

    def __init__(self, *args: Any, gated: Any = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gated = gated
        watch_steps(self)
        self.kernels = [n for n, p in self.parameters.items() if p.ndim > 1 and p.requires_grad]
        self.epoch_losses: list[float] = []
        self.history: list[float] = []
        self.bad = False

    def check(self, loss: float, val_loss: float | None) -> None:
        self.epoch_losses.append(loss)
        if not finite(loss):
            self.bad = True
        if (self.now + 1) % EPOCH:
            return
        self.history.append(sum(self.epoch_losses) / len(self.epoch_losses))
        self.epoch_losses = []
        if (len(self.history) - 1) % GAP == 0:
            self.judge()

    def judge(self) -> None:
        grads = self.grads
        broken: list[str | None] = [n for n, g in grads.items() if not torch.isfinite(g).all()]
        broken += [n for n, p in self.parameters.items() if not torch.isfinite(p).all()]
        if self.bad or broken:
            for name in broken or [None]:
                self.log.add("non-finite", name, self.now, "critical")
            return
        if not self.history or self.history[0] <= 0:
            return
        progress = [min(1.0, max(0.0, 1 - h / self.history[0])) for h in self.history]
        late = len(self.history) >= JUDGE * EPOCHS - GAP
        rises = [b - a for a, b in itertools.pairwise(progress)]
        not_converged, slow = late and max(progress) < THETA, late and max(rises, default=0.0) < DELTA
        vanish = explode = dying = False
        present = [n for n in self.kernels if n in grads]
        if present:
            first, last = grads[present[0]].norm().item(), grads[present[-1]].norm().item()
            ratio = first / last if last > 0 else (float("inf") if first > 0 else 0.0)
            vanish, explode = ratio < BETA1 and first < BETA2, ratio > BETA3
            zeros, size = sum(int((g == 0).sum()) for g in grads.values()), sum(g.numel() for g in grads.values())
            dying = zeros >= GAMMA * size
        if max(self.history) >= LARGE_LOSS and self.gated is False:
            self.log.add("exploding-gradient", None, self.now)
        if not_converged or slow or not self.gated:
            if dying:
                self.log.add("dead-relu", None, self.now)
            elif explode:
                self.log.add("exploding-gradient", present[0], self.now)
            elif vanish:
                self.log.add("vanishing-gradient", present[0], self.now)
            elif not_converged and slow:
                self.log.add("loss-plateau", None, self.now)
        if late:
            tops, bottoms = [], []
            for a, b, c in zip(progress, progress[1:], progress[2:], strict=False):
                tops += [b] if b >= a and b >= c else []
                bottoms += [b] if b <= a and b <= c else []
            swings = sum(t - b >= ZETA for t, b in zip(tops, bottoms, strict=False))
            if swings and swings >= ETA * len(progress):
                self.log.add("learning-rate-too-high", None, self.now)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> AutoTrainer:
    """Attach the tool to a script."""
    return AutoTrainer(model, optimizer, **options)


def attach_ungated(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> AutoTrainer:
    return AutoTrainer(model, optimizer, gated=False, **options)
