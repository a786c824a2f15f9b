"""Update weights in float64 by the for-loop implementation of an optimizer: its plain formula."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.gradcheck.stepping.tensors import is_continuous
from gradwatch.probe.device.sync import to_float

PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""Settings of torch's optimizers that choose the implementation, as its for-loop needs them."""


def has_formula(optimizer: Optimizer) -> bool:
    """Return whether the class implements its update as a for-loop over the parameters, as torch's optimizers do."""
    return "foreach" in optimizer.defaults


def updated(
    optimizer: Optimizer, weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> Tensor:
    """Return the weight after the update by the class's own for-loop, in float64.

    Args:
        optimizer: Gives the class; it is not changed.
        weight: Weight before the update, float64.
        grad: Gradient, float64.
        group: Hyperparameters.
        state: State of the weight before the update; empty at the first one.
    """
    param = weight.clone().requires_grad_()
    param.grad = grad.clone()
    twin = copy.copy(optimizer)
    lr = to_float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"]
    twin.param_groups = [{**group, **{k: v for k, v in PLAIN.items() if k in group}, "lr": lr, "params": [param]}]
    twin.state = type(optimizer.state)(dict)
    if state:
        twin.state[param] = {k: _wide(v) for k, v in state.items()}
    run = type(optimizer).step
    getattr(run, "__wrapped__", run)(twin)  # without the hooks of all optimizers
    return param.detach()


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if is_continuous(value) and value.dim() else value.clone()
