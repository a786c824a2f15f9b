"""Bound, element by element, how far rounding alone drives two implementations of an optimizer's step apart."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

UNIT = 2.0**-24  # the largest relative error of one rounding to float32
Before = tuple[Tensor, Tensor | None]  # the weight and the mean of gradients that a step begins with


class RoundingBounds:
    """Follows an optimizer without fused multiply-add, and bounds its distance from a twin that has it.

    Both carry out the same operations in the same order. A term `UNIT * |value|` stands for each rounding of a value:
    2 where both round it, since their operands may differ already; 1 for a product that only the optimizer without
    fused multiply-add rounds. The distance of the operands is multiplied by the derivative of the operation. This is a
    running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.3) to first order
    in UNIT. So a result near zero is bounded by the operands that cancelled.

    Args:
        optimizer: SGD, Adam or AdamW of torch, before its first step.

    Attributes:
        weights: Bound of each parameter's elements, float64.
        state: Bounds of each parameter's state, by the names in `optimizer.state`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.weights: dict[Tensor, Tensor] = {}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._before: dict[Tensor, Before] = {}
        self._add = _add_sgd if isinstance(optimizer, torch.optim.SGD) else _add_adam
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            names = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            self.weights[param] = torch.zeros_like(param, dtype=torch.float64, requires_grad=False)
            self.state[param] = {name: self.weights[param].clone() for name in names}
            self.state[param]["step"] = torch.zeros((), dtype=torch.float64)  # a count is exact
        optimizer.register_step_pre_hook(self._keep_operands)
        optimizer.register_step_post_hook(self._add_step)

    def _keep_operands(self, optimizer: Optimizer, *_: Any) -> None:
        for param in self.weights:
            state = optimizer.state.get(param, {})
            mean = state.get("exp_avg", state.get("momentum_buffer"))
            self._before[param] = _double(param), None if mean is None else _double(mean)

    def _add_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                before = self._before[param]
                state, weight_error = optimizer.state[param], self.weights[param]
                self.weights[param] = self._add(group, param, before, state, weight_error, self.state[param])


def _gradient(group: Mapping[str, Any], param: Tensor, weight: Tensor, weight_error: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient that a step follows, `grad + decay * weight` where decay is coupled, and its bound."""
    grad = _double(param.grad) * (-1 if group["maximize"] else 1)
    if not group["weight_decay"] or group.get("decoupled_weight_decay"):
        return grad, torch.zeros_like(grad)
    decayed = group["weight_decay"] * weight
    x = grad + decayed
    return x, group["weight_decay"] * weight_error + UNIT * (decayed.abs() + 2 * x.abs())


def _add_sgd(
    group: Mapping[str, Any],
    param: Tensor,
    before: Before,
    state: Mapping[str, Tensor],
    weight_error: Tensor,
    state_error: dict[str, Tensor],
) -> Tensor:
    """Bound one more step of SGD: bring `state_error` up to date, and return the bound of the weights."""
    weight, old = before
    x, x_error = _gradient(group, param, weight, weight_error)
    momentum, rest = group["momentum"], 1 - group["dampening"]
    if momentum:
        mean, mean_error = _double(state["momentum_buffer"]), x_error  # the first buffer is the gradient itself
        if old is not None:
            # momentum * old + rest * x: of the products, torch rounds both and the twin one, whichever it may be
            kept, added = (momentum * old).abs(), (rest * x).abs()
            roundings = kept + added + torch.maximum(kept, added) + 2 * mean.abs()
            mean_error = momentum * state_error["momentum_buffer"] + rest * x_error + UNIT * roundings
        state_error["momentum_buffer"] = mean_error
        if group["nesterov"]:  # x + momentum * mean
            x, product = x + momentum * mean, momentum * mean
            x_error = x_error + momentum * mean_error + UNIT * (product.abs() + 2 * x.abs())
        else:
            x, x_error = mean, mean_error
    rate = group["lr"]  # weight - rate * x
    return weight_error + rate * x_error + UNIT * (rate * x.abs() + 2 * _double(param).abs())


def _add_adam(
    group: Mapping[str, Any],
    param: Tensor,
    before: Before,
    state: Mapping[str, Tensor],
    weight_error: Tensor,
    state_error: dict[str, Tensor],
) -> Tensor:
    """Bound one more step of Adam or AdamW, like `_add_sgd`."""
    weight, old = before
    x, x_error = _gradient(group, param, weight, weight_error)
    beta1, beta2 = group["betas"]
    mean, square = _double(state["exp_avg"]), _double(state["exp_avg_sq"])

    # mean: `old + c * (x - old)` with c = 1 - beta1, or `x + c * (x - old)` with c = -beta1, whichever c is smaller.
    # Both round the difference, one the product, both the sum.
    product = min(beta1, 1 - beta1) * (x if old is None else x - old).abs()
    roundings = 3 * product + 2 * mean.abs()
    state_error["exp_avg"] = beta1 * state_error["exp_avg"] + (1 - beta1) * x_error + UNIT * roundings

    # square: `beta2 * old + (1 - beta2) * x * x`. Neither term, both positive, is rounded more than 4 times: 2 products
    # in both; then both round the sum.
    error = beta2 * state_error["exp_avg_sq"] + 2 * (1 - beta2) * x.abs() * x_error + UNIT * 6 * square
    state_error["exp_avg_sq"] = error
    if group["amsgrad"]:
        square = _double(state["max_exp_avg_sq"])
        error = state_error["max_exp_avg_sq"] = torch.maximum(error, state_error["max_exp_avg_sq"])

    # weight: `keep * weight - pace * mean / (sqrt(square) / root + eps)`. Nothing can be fused, and both round each of
    # 7 results: 5 of the update, the product with keep, the difference.
    count, rate, decay = float(state["step"]), group["lr"], group["weight_decay"]
    root = (1 - beta2**count) ** 0.5
    slope = rate / (1 - beta1**count) / (square.sqrt() / root + group["eps"])
    update_error = slope * state_error["exp_avg"] + (slope * mean).abs() * (error / (2 * square) + UNIT * 2 * 5)
    if decay and group["decoupled_weight_decay"]:
        keep = 1 - rate * decay
        weight_error = keep * weight_error + UNIT * 2 * (keep * weight).abs()
    return weight_error + update_error + UNIT * 2 * _double(param).abs()


def _double(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "only a parameter with a gradient is stepped"
    return tensor.detach().to(torch.float64, copy=True)
