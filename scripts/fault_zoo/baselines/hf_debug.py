"""Hugging Face transformers: DebugUnderflowOverflow, mode 1 (src/transformers/debug_utils.py).

A forward hook on every module looks at the module's own weights, its positional inputs and its outputs (tuples one
and two
levels deep); the first NaN or Inf in any of them raises ValueError and ends the training. There is no other threshold:
the absolute minimum and maximum are printed in the report, not judged. The hooks run in evaluation too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.fault_zoo.baselines.common import Baseline


class DebugUnderflowOverflow(Baseline):
    """Raise at the first NaN or Inf in weights, inputs or outputs of a module."""

    raises = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            module.register_forward_hook(self.look)

    def look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        values = list(module.parameters(recurse=False))
        values += list(inputs) if isinstance(inputs, tuple) else [inputs]
        for o in output if isinstance(output, tuple) else (output,):
            values += list(o) if isinstance(o, tuple) else [o]
        for v in values:
            if isinstance(v, torch.Tensor) and (torch.isnan(v).any() or torch.isinf(v).any()):
                self.log.add("non-finite", self.modules.get(module) or None, self.now, "critical")
                raise ValueError(
                    "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further."
                )

    def check(self, loss: float, val_loss: float | None) -> None:
        pass


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> DebugUnderflowOverflow:
    """Attach the tool to a script."""
    return DebugUnderflowOverflow(model, optimizer, **options)
