"""Update weights in float64 by the plain formula of an optimizer, as its paper writes it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradwatch.gradcheck.stepping.tensors import is_continuous
from gradwatch.probe.device.sync import to_float

State = Mapping[str, Any]


def has_formula(optimizer: Optimizer) -> bool:
    """Return whether there is a plain formula: one of this file, or the for-loop implementation of torch."""
    return type(optimizer) in PLAIN or "foreach" in optimizer.defaults


def updated(optimizer: Optimizer, weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: State) -> Tensor:
    """Return the weight after the update, in float64.

    Args:
        optimizer: Gives the class; it is not changed.
        weight: Weight before the update, float64.
        grad: Gradient, float64.
        group: Hyperparameters.
        state: State of the weight before the update; empty at the first one.
    """
    formula = PLAIN.get(type(optimizer))
    if formula is not None:
        return formula(weight, -grad if group.get("maximize") else grad, group, state)
    return _by_for_loop(optimizer, weight, grad, group, state)


def _sgd(weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: State) -> Tensor:
    grad = grad + group["weight_decay"] * weight
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        buffer = grad if buffer is None else group["momentum"] * buffer.to(grad) + (1 - group["dampening"]) * grad
        grad = grad + group["momentum"] * buffer if group["nesterov"] else buffer
    return weight - to_float(torch.as_tensor(group["lr"])) * grad


def _adam(weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: State) -> Tensor:
    beta1, beta2 = map(float, group["betas"])
    lr, decay, step = float(group["lr"]), group["weight_decay"], float(state.get("step", 0)) + 1
    if group.get("decoupled_weight_decay"):
        weight = weight * (1 - lr * decay)
    else:
        grad = grad + decay * weight
    zero = torch.zeros_like(grad)
    first: Tensor = beta1 * state.get("exp_avg", zero).to(grad) + (1 - beta1) * grad
    second: Tensor = beta2 * state.get("exp_avg_sq", zero).to(grad) + (1 - beta2) * grad * grad
    largest = torch.maximum(state.get("max_exp_avg_sq", zero).to(grad), second) if group["amsgrad"] else second
    denominator = (largest / (1 - beta2**step)).sqrt() + group["eps"]
    moved: Tensor = weight - lr * (first / (1 - beta1**step)) / denominator
    return moved


def _adamw(weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: State) -> Tensor:
    return _adam(weight, grad, {**group, "decoupled_weight_decay": True}, state)


PLAIN = {SGD: _sgd, Adam: _adam, AdamW: _adamw}
"""arXiv:1412.6980, alg. 1; arXiv:1711.05101, alg. 2; and the notes on SGD in torch's documentation."""


def _by_for_loop(optimizer: Optimizer, weight: Tensor, grad: Tensor, group: Mapping[str, Any], state: State) -> Tensor:
    """Run the class's own for-loop implementation on a float64 copy."""
    param = weight.clone().requires_grad_()
    param.grad = grad.clone()
    twin = copy.copy(optimizer)
    plain = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
    lr = to_float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"]
    twin.param_groups = [{**group, **{k: v for k, v in plain.items() if k in group}, "lr": lr, "params": [param]}]
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
