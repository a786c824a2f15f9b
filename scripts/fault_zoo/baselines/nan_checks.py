"""The checks for NaN and Inf that PyTorch users have at hand.

`anomaly`     torch.autograd.set_detect_anomaly(True) (docs: "any backward computation that generates nan value will
              raise
              an error"; NaN only, not Inf). It is PyTorch's own mode that runs here; the error it raises ends the
              training.
              Its message names an autograd function, no layer.
`lightning`   Lightning 1.x Trainer(terminate_on_nan=True) and
              lightning.pytorch.utilities.finite_checks.detect_nan_parameters:
              after each step the loss must be finite and then every parameter; the error names the parameter and ends
              the training. (In Lightning 2 what is left is EarlyStopping(check_finite=True) on the logged loss.)
`gradients`   torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True): the total gradient norm is finite at each
              step.
              Here it only reports. Steps that a GradScaler skips never get there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scripts.fault_zoo.baselines.common import Baseline, finite, watch_steps


class Anomaly(Baseline):
    """Turn on the anomaly mode of autograd and record that it raised."""

    raises = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.autograd.set_detect_anomaly(True)
        inner = torch.autograd.backward

        def backward(*a: Any, **k: Any) -> Any:
            try:
                return inner(*a, **k)
            except RuntimeError as error:
                if "nan values" in str(error):
                    self.log.add("non-finite", None, self.now, "critical")
                raise

        torch.autograd.backward = backward

    def check(self, loss: float, val_loss: float | None) -> None:
        pass


class Lightning(Baseline):
    """Raise at a loss or a parameter that is not finite."""

    raises = True

    def check(self, loss: float, val_loss: float | None) -> None:
        if not finite(loss):
            self.log.add("non-finite", None, self.now, "critical")
            raise ValueError("The loss returned in `training_step` is not finite.")
        for name, p in self.parameters.items():
            if not torch.isfinite(p).all():
                self.log.add("non-finite", name, self.now, "critical")
                raise ValueError(f"Detected nan and/or inf values in `{name}`.")


class Gradients(Baseline):
    """Report gradients that are not finite."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        watch_steps(self)

    def check(self, loss: float, val_loss: float | None) -> None:
        for name, g in self.grads.items():
            if not torch.isfinite(g).all():
                self.log.add("non-finite", name, self.now, "critical")
        self.grads = {}


def anomaly(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Anomaly:
    """Attach the anomaly mode of autograd to a script."""
    return Anomaly(model, optimizer, **options)


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Lightning:
    """Attach the check of Lightning to a script."""
    return Lightning(model, optimizer, **options)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Gradients:
    """Attach the check of gradients to a script."""
    return Gradients(model, optimizer, **options)
