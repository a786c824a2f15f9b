"""trainpulse 0.4.0 from PyPI (stef41/trainpulse): the tool itself, with its default MonitorConfig.

    pip install --no-deps trainpulse==0.4.0

Logged at each step: "loss", "grad_norm" (total L2 norm as the optimizer gets it) and "learning_rate" of the first
group.
Its defaults: loss spike over 5 times the mean of 50, gradient norm over 100 or under 1e-7, loss without improvement for
its plateau patience, rate changed more than 10 times in one step, NaN or Inf in any metric. It has no notion of layers.
A sudden change of the rate has no kind here and is left out; a loss spike stands for "gradient-spike"; severities are
its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from trainpulse import Monitor

from scripts.fault_zoo.baselines.common import Baseline, watch_steps


class Trainpulse(Baseline):
    """Run the tool and translate its alerts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tool = Monitor()
        watch_steps(self)

    def check(self, loss: float, val_loss: float | None) -> None:
        alerts = self.tool.log("loss", self.now, loss)
        if self.grads:
            norm = math.sqrt(sum(float(g.float().pow(2).sum()) for g in self.grads.values()))
            alerts += self.tool.log("grad_norm", self.now, norm)
        self.grads = {}
        alerts += self.tool.log("learning_rate", self.now, self.optimizer.param_groups[0]["lr"])
        for alert in alerts:
            kind = {"nan_detector": "non-finite", "loss_spike": "gradient-spike", "plateau": "loss-plateau"}.get(
                alert.detector
            )
            if alert.detector == "gradient":
                kind = "exploding-gradient" if "explosion" in alert.message else "vanishing-gradient"
            if kind:
                self.log.add(kind, None, self.now, alert.severity.name.lower())


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Trainpulse:
    """Attach the tool to a script."""
    return Trainpulse(model, optimizer, **options)
