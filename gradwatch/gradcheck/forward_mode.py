"""Differentiate the loss by forward mode, if every operation supports it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from gradwatch.gradcheck.stepping.step import CheckedStep, Point
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.stepped_model import SteppedModel


def forward_derivative(step: CheckedStep, point: Point, shifts: Mapping[str, Tensor]) -> float | None:
    """Return the derivative of the loss along shifts of leaves, or None if an operation lacks forward mode.

    Args:
        step: The step. One that runs its own backward pass has no forward mode.
        point: The point at which to differentiate.
        shifts: Shift of each leaf.
    """
    if step.model is None or step.fills:
        return None
    step.move(point)
    try:
        with step.placed(), forward_ad.dual_level(), torch.enable_grad():
            duals = {n: forward_ad.make_dual(step.leaves[n], v) for n, v in shifts.items()}
            by_id = {id(step.leaves[n]): d for n, d in duals.items()}
            batch = tree_map_only(Tensor, lambda t: by_id.get(id(t), t), step.batch)
            names = {f"model.{n}": d for n, d in duals.items() if isinstance(step.leaves[n], nn.Parameter)}
            stepped = SteppedModel(step.model, lambda *parts: step.scalar(*parts))
            loss = functional_call(stepped, names, batch)
            tangent = forward_ad.unpack_dual(loss).tangent
            return 0.0 if tangent is None else to_float(tangent)
    except (RuntimeError, NotImplementedError):  # an operation of the step has no forward mode
        return None
