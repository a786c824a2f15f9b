"""Compare a derivative along a direction of the weights with central differences."""

# P = tensors

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.untouched import untouched

STEP_EXPONENTS = (1 / 3, 1 / 2)
"""Powers of the dtype's epsilon: the steps of a difference, relative to the norm of the weights.

1/3 balances rounding against the third derivative; 1/2 crosses fewer kinks of ReLUs.
"""
MAX_DISAGREEMENT_FRAC = 1e-3
"""Tolerated disagreement of autograd and a difference, relative to the product."""
ROUNDING_EPS = 16
"""Rounding error of a gradient or an output, in epsilons of its dtype, relative to its norm."""


def steps_along(params: Sequence[Tensor], direction_P: Sequence[Tensor], epsilon: float) -> list[float]:
    """Return the long and the short multiple of a direction for differences."""
    size = (norm(params) or 1.0) / norm(direction_P)
    return [epsilon**exponent * size for exponent in STEP_EXPONENTS]


def check_product(
    values_at: Callable[[float], list[Tensor]],
    values_P: Sequence[Tensor],
    product_P: Sequence[Tensor],
    *,
    steps: Sequence[float],
    epsilon: float,
    wrong: str,
) -> None:
    """Compare a derivative along a direction with central differences.

    Args:
        values_at: Returns the values at weights that are shifted by a multiple of the direction: gradients or outputs.
        values_P: Values at the weights themselves.
        product_P: Derivative of the values along the direction, by autograd.
        steps: The long and the short multiple for the differences. Agreement at either is enough; only the short one
            shows a disagreement, because a long one may leave the region where the loss is smooth.
        epsilon: Epsilon of the dtype.
        wrong: Message with three fields: the norm by autograd, the norm by differences, and how far they are apart.

    Raises:
        GradwatchError: The disagreement is larger than rounding, kinks and higher derivatives explain.
    """
    by_autograd = norm(product_P)
    slopes: list[list[Tensor]] = []
    for step in steps:
        above_P, below_P = values_at(step), values_at(-step)
        slopes.append([(a.double() - b.double()) / (2 * step) for a, b in zip(above_P, below_P, strict=True)])
        rounding = ROUNDING_EPS * epsilon * norm(values_P) / step
        disagreement = distance(slopes[-1], product_P)
        if disagreement <= MAX_DISAGREEMENT_FRAC * by_autograd + rounding:
            return
    # a kink on one side, a third derivative and random rounding make the slopes of the two sides differ
    sides_P = zip(above_P, values_P, below_P, strict=True)
    asymmetry = norm([(a.double() - 2 * g.double() + b.double()) / step for a, g, b in sides_P])
    # kinks on both sides and coarse rounding depend on the step, a wrong product does not
    spread = distance(*slopes)
    by_differences = norm(slopes[-1])
    # otherwise the loss changes within less than the step, and the slope says nothing
    is_resolved = asymmetry + spread <= by_differences / 2 + rounding
    unexplained = disagreement - asymmetry - spread - rounding
    if is_resolved and unexplained > MAX_DISAGREEMENT_FRAC * max(by_autograd, by_differences):
        raise GradwatchError(wrong.format(by_autograd, by_differences, disagreement))


def values_at(
    model: nn.Module,
    compute: Callable[[], Sequence[Tensor]],
    params: Sequence[Tensor],
    direction_P: Sequence[Tensor],
    step: float,
) -> list[Tensor]:
    """Return what a function computes at shifted weights, and restore the weights."""
    kept_P = [p.detach().clone() for p in params]
    with untouched(model, params), torch.enable_grad():
        try:
            for p, direction in zip(params, direction_P, strict=True):
                p.data.add_(direction, alpha=step)  # data: a graph that other code still holds stays usable
            return [v.detach() for v in compute()]
        finally:
            for p, kept in zip(params, kept_P, strict=True):
                p.data.copy_(kept)


def _dot(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return math.fsum(
        to_float(torch.vdot(a.double().flatten(), b.double().flatten())) for a, b in zip(a_P, b_P, strict=True)
    )


def distance(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return norm([a.double() - b.double() for a, b in zip(a_P, b_P, strict=True)])


def norm(vector_P: Sequence[Tensor]) -> float:
    return math.sqrt(_dot(vector_P, vector_P))
