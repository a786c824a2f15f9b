"""torchmortem 0.1.1 from PyPI (sebseager/torchmortem): the tool itself, run as its README says.

    pip install --no-deps torchmortem==0.1.1      (its jinja2 and plotly are only needed to render the HTML report)

Autopsy(model, optimizer=optimizer) with the default sampling "balanced"; autopsy.step(loss=loss.item()) after each
step; it
analyses when it is detached, so everything is reported at the last step of the run (latencies say so).
Its titles and the kinds they stand for are below; "Rank collapse" has no kind here and is left out; severities are
its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchmortem import Autopsy

from scripts.fault_zoo.baselines.common import Baseline
from scripts.fault_zoo.protocol import Finding

KINDS = (
    ("Vanishing gradients", "vanishing-gradient"),
    ("Exploding gradients", "exploding-gradient"),
    ("Gradient stalling", "dead-layer"),
    ("Dead units", "dead-relu"),
    ("Activation saturation", "saturated-activation"),
    ("Update ratio too low", "learning-rate-too-low"),
    ("Update ratio too high", "learning-rate-too-high"),
    ("Training divergence", "learning-rate-too-high"),
    ("Loss plateau", "loss-plateau"),
    ("Weight norm explosion", "learning-rate-too-high"),
    ("Stagnant weight norms", "not-optimized"),
    ("Inter-layer weight norm imbalance", "poor-initialization"),
    ("High gradient noise", "oscillating-gradient"),
)


class Torchmortem(Baseline):
    """Run the tool and translate the titles of its findings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tool = Autopsy(self.model, optimizer=self.optimizer)
        self.tool.attach()

    def check(self, loss: float, val_loss: float | None) -> None:
        self.tool.step(loss=loss)

    def findings(self) -> list[Finding]:
        self.tool.detach()
        report, last = self.tool.get_report(), max(0, self.now - 1)
        for f in sorted(report.findings if report else [], key=lambda f: -int(f.severity)):
            kind = next((kind for start, kind in KINDS if f.title.startswith(start)), None)
            if kind is not None:
                for layer in f.affected_layers or [None]:
                    self.log.add(kind, layer, last, f.severity.name.lower())
        return list(self.log)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Torchmortem:
    """Attach the tool to a script."""
    return Torchmortem(model, optimizer, **options)
