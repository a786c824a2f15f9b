"""Measure the sharpest curvature of a loss: the largest eigenvalue of its Hessian, with an error bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.hessian.hessian import hessian_of
from gradwatch.probe.hessian.lanczos import largest_eigenvalue

STABLE = 2.0
"""Curvature times rate beyond which gradient descent overshoots; Cohen et al. 2021, arXiv:2103.00065, sec. 2."""
MIN_PRODUCTS = 3
"""One product to start, one for the error, one to check autograd."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """The largest eigenvalue of the Hessian of a loss. Its text is one line, with the error bar.

    Args:
        sharpness: Largest eigenvalue of the Hessian; negative if the loss bends down in every direction.
        error: Norm of the residual: an eigenvalue of the Hessian lies within this distance of `sharpness`. If several
            lie closer together than the error, it need not be the largest of them.
        products: Number of products of the Hessian with a vector, including one that checks autograd.
        converged: Whether the error is within the tolerance.
        loss: The loss at these weights, on this batch.
        largest_rate: 2 / sharpness, the largest stable rate of plain gradient descent; infinite if the sharpness is not
            positive.
    """

    sharpness: float
    error: float
    products: int
    converged: bool
    loss: float

    def __str__(self) -> str:
        end = "converged" if self.converged else "not converged: raise max_products"
        return f"sharpest curvature {self._bar} ({self.products} products with the Hessian, {end})"

    @property
    def largest_rate(self) -> float:
        """Return the largest stable learning rate of plain gradient descent."""
        return _stable_rate(self.sharpness)

    def verdict(self, rate: float) -> str:
        """Return one sentence on a learning rate.

        Args:
            rate: Rate of plain gradient descent. Momentum b allows 1 + b times more. Adam divides by its own
                denominator first, so for Adam only the growth of the curvature over a run can be compared.
        """
        bound = self.largest_rate
        low, high = (_stable_rate(self.sharpness + side * self.error) for side in (1, -1))
        if low < rate <= high:
            where = "too close to it to tell at this error"
        else:
            where = f"{'above' if rate > bound else 'within'} it, by a factor of {_factor(rate, bound):.3g}"
        return (
            f"the sharpest curvature is {self._bar}{'' if self.converged else ' (not converged)'}: steps of plain "
            f"gradient descent are stable up to a rate of {bound:.3g}; {rate:g} is {where}"
        )

    @property
    def _bar(self) -> str:
        return f"{self.sharpness:.3g} +/- {self.error:.1g}"


def curvature(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    max_products: int = 40,
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Curvature:
    """Measure the sharpest curvature of a loss at the current weights of a model.

    Lanczos iteration finds the largest eigenvalue of the Hessian from products with vectors. Each product takes about
    two backward passes (Pearlmutter 1994). The first vector is random, from a separate generator. One product is
    compared with a difference of gradients, because autograd treats a backward outside its graph as a constant. Up to
    16 vectors as large as the parameters are kept. Gradients, weights, buffers, modes and the state of all generators
    stay unchanged.

    Args:
        model: Model with the trainable parameters of the Hessian.
        loss: Computes the loss of one fixed batch from the model, with its graph. It is called several times, also at
            slightly shifted weights, each time with the same buffers and the same state of torch's generators.
        max_products: Maximum number of products of the Hessian with a vector, at least 3.
        tolerance: Error at which to stop, relative to the eigenvalue.
        seed: Seed of the first vector.

    Returns:
        The curvature, with its error bar, the number of products, and whether it has converged.

    Raises:
        GradwatchError: The loss depends on no trainable parameter or is linear in each, the loss or its second
            derivative is not finite, a parameter is complex, `max_products` is too small, or an operation has no
            second derivative or a wrong one.
    """
    if max_products < MIN_PRODUCTS:
        raise GradwatchError(f"curvature: max_products is {max_products}, expected at least {MIN_PRODUCTS}")
    with hessian_of(model, loss, caller="curvature") as hessian:
        start = hessian.random(seed)
        found = largest_eigenvalue(
            hessian.times, start, max_products=max_products - 1, tolerance=tolerance, epsilon=hessian.epsilon
        )
        # the random vector finds a mistake outside the eigenvector; the eigenvector outweighs the kinks
        direction = start / torch.linalg.vector_norm(start) + found.vector
        product = hessian.times(direction)
    hessian.check(direction, product)
    if hessian.is_zero:
        raise GradwatchError("curvature: the loss is linear in every parameter, so it has no curvature")
    return Curvature(
        sharpness=found.value,
        error=found.error,
        products=found.products + 1,
        converged=found.converged,
        loss=hessian.value,
    )


def _stable_rate(sharpness: float) -> float:
    return STABLE / sharpness if sharpness > 0 else math.inf


def _factor(rate: float, bound: float) -> float:
    return max(rate / bound, bound / rate) if 0 < bound < math.inf and rate > 0 else math.inf
