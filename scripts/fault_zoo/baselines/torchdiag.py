"""torchdiag 0.1.0 (AddyM/torchdiag): its thresholds, looked at every ten steps from step 0.

Source: README and torchdiag/diagnostics.py. check_gradients: max |g| over 100 explodes, below 1e-7 vanishes, grad
None is
disconnected. check_dead_neurons (ReLU, LeakyReLU, ELU, GELU): a neuron that is zero for every sample of the batch is
dead; over
20% of a layer is a warning, over 50% critical. verify_step (at step 1): parameters that did not change in a step. The
tool is
meant to be called by hand; the interval is chosen here. It prints "critical" only for dead neurons; the rest is
"warning".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.fault_zoo.baselines.common import Baseline, finite, units, watch_modules, watch_steps

EVERY, EXPLODE, VANISH, WARN, CRITICAL = 10, 100.0, 1e-7, 0.2, 0.5


class Torchdiag(Baseline):
    """Apply the thresholds every ten steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch_steps(self)
        self.outputs: dict[str, Tensor] = {}
        watch_modules(
            self, (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU), lambda n, m, i, o: self.outputs.__setitem__(n, o.detach())
        )
        self.before = {n: p.detach().clone() for n, p in self.parameters.items()}

    def check(self, loss: float, val_loss: float | None) -> None:
        if self.now == 0:
            if not finite(loss):
                self.log.add("non-finite", None, 0)
            for n, p in self.parameters.items():
                if p.requires_grad and bool((p == self.before[n]).all()):
                    self.log.add("not-optimized", n, 0)
            self.before = {}
        if self.now % EVERY == 0 and self.grads:
            for n, p in self.parameters.items():
                if not p.requires_grad:
                    continue
                if n not in self.grads:
                    self.log.add("no-gradient", n, self.now)
                    continue
                top = self.grads[n].abs().max().item()
                if top > EXPLODE:
                    self.log.add("exploding-gradient", n, self.now)
                elif top < VANISH:
                    self.log.add("vanishing-gradient", n, self.now)
            for n, o in self.outputs.items():
                dead = (units(o) == 0).all(0).float().mean().item()
                if dead > WARN:
                    self.log.add("dead-relu", n, self.now, "critical" if dead > CRITICAL else "warning")
        self.grads, self.outputs = {}, {}


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Torchdiag:
    """Attach the tool to a script."""
    return Torchdiag(model, optimizer, **options)
