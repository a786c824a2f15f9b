"""Measure both ends of the spectrum of a Hessian: a minimum, a saddle, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.hessian.hessian import hessian_of
from gradwatch.probe.hessian.lanczos import largest_eigenvalue

MIN_PRODUCTS = 5
"""Two for each end, one to check autograd."""

Shape = Literal["bends up", "bends down", "saddle", "flat"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """The largest and the smallest eigenvalue of the Hessian of a loss, with error bars.

    Args:
        largest: Largest eigenvalue.
        largest_error: Norm of its residual: an eigenvalue lies within this distance.
        smallest: Smallest eigenvalue.
        smallest_error: Norm of its residual.
        slope: Norm of the gradient. Only where it is 0 are these weights a minimum, a maximum or a saddle point.
        products: Number of products of the Hessian with a vector.
        converged: Whether both errors are within the tolerance.
        loss: The loss at these weights, on this batch.
    """

    largest: float
    largest_error: float
    smallest: float
    smallest_error: float
    slope: float
    products: int
    converged: bool
    loss: float

    @property
    def shape(self) -> Shape:
        """Return how the loss bends, by eigenvalues that are farther from 0 than their errors.

        `bends up`: up in some directions and down in none; a minimum, if the slope is 0. `bends down`: the reverse.
        `saddle`: up in some and down in others. `flat`: no eigenvalue differs from 0 by more than its error.
        """
        is_up, is_down = self.largest > self.largest_error, self.smallest < -self.smallest_error
        if is_up and is_down:
            return "saddle"
        if is_up or is_down:
            return "bends up" if is_up else "bends down"
        return "flat"

    def __str__(self) -> str:
        ends = (
            f"from {self.smallest:.3g} +/- {self.smallest_error:.1g} to {self.largest:.3g} +/- {self.largest_error:.1g}"
        )
        meaning = {
            "bends up": "the loss bends up in some directions and down in none",
            "bends down": "the loss bends down in some directions and up in none",
            "saddle": "the loss bends up in some directions and down in others: a saddle",
            "flat": "no eigenvalue differs from 0 by more than its error",
        }[self.shape]
        end = "" if self.converged else "; not converged: raise max_products"
        return f"eigenvalues of the Hessian {ends}; {meaning}; the gradient has norm {self.slope:.3g}{end}"


def spectrum(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    max_products: int = 120,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Spectrum:
    """Measure the largest and the smallest eigenvalue of the Hessian of a loss at the current weights.

    Lanczos iteration finds the largest eigenvalue, and then the smallest, with the Hessian subtracted from the largest.
    The rest is as for `gradwatch.curvature`, which finds the largest alone, in fewer products.

    Args:
        model: Model with the trainable parameters of the Hessian.
        loss: As for `gradwatch.curvature`.
        max_products: Maximum number of products of the Hessian with a vector, at least 5.
        tolerance: Error at which to stop, relative to the largest eigenvalue, and for the smallest to the distance
            between both.
        seed: Seed of the first vectors.

    Raises:
        GradwatchError: As `gradwatch.curvature`.
    """
    if max_products < MIN_PRODUCTS:
        raise GradwatchError(f"spectrum: max_products is {max_products}, expected at least {MIN_PRODUCTS}")
    with hessian_of(model, loss, caller="spectrum") as hessian:
        start = hessian.random(seed)
        half = (max_products - 1) // 2
        top = largest_eigenvalue(hessian.times, start, max_products=half, tolerance=tolerance, epsilon=hessian.epsilon)
        # shifted, since the smallest may be near 0, where no relative error can be reached
        bottom = largest_eigenvalue(
            lambda vector: top.value * vector - hessian.times(vector),
            hessian.random(seed + 1),
            max_products=max_products - 1 - top.products,
            tolerance=tolerance,
            epsilon=hessian.epsilon,
        )
        direction = start / torch.linalg.vector_norm(start) + top.vector + bottom.vector
        product = hessian.times(direction)
    hessian.check(direction, product)
    if hessian.is_zero:
        raise GradwatchError("spectrum: the loss is linear in every parameter, so it has no curvature")
    return Spectrum(
        largest=top.value,
        largest_error=top.error,
        smallest=top.value - bottom.value,
        smallest_error=bottom.error,
        slope=hessian.slope,
        products=top.products + bottom.products + 1,
        converged=top.converged and bottom.converged,
        loss=hessian.value,
    )
