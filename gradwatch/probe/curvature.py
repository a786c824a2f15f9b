"""Measure the sharpest curvature of a loss: the largest eigenvalue of its Hessian, with an error bar."""

# P = parameter tensors that the loss depends on

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.lanczos import largest_eigenvalue
from gradwatch.probe.untouched import untouched

STABLE = 2.0
"""Curvature times rate beyond which gradient descent overshoots; Cohen et al. 2021, arXiv:2103.00065, sec. 2."""
MIN_PRODUCTS = 3
"""One product to begin, one for the error, one to check autograd."""
STEP_EXPONENTS = (1 / 3, 1 / 2)
"""Powers of the dtype's epsilon: the steps of a difference of gradients, relative to the norm of the weights.

1/3 balances rounding against the third derivative; 1/2 crosses fewer kinks of ReLUs.
"""
MAX_DISAGREEMENT_FRAC = 1e-3
"""Tolerated disagreement of autograd and a difference of gradients, relative to the product."""
GRADIENT_ROUNDING_EPS = 16
"""Rounding error of a gradient, in epsilons of its dtype, relative to its norm."""
NO_SECOND_DERIVATIVE = (
    "curvature: an operation of the loss has no second derivative: {}; replace it by one that has, for attention with "
    "`with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around the forward pass in `loss`"
)
NOT_FINITE = (
    "curvature: the second derivative of the loss is not finite at these weights; an operation such as the square root "
    "or the norm of 0 has none: add a small constant inside it"
)


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
        largest_rate: 2 / sharpness, the largest stable rate of plain gradient descent; infinite where nothing bends up.
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
    params = [p for p in model.parameters() if p.requires_grad]
    _check_arguments(params, max_products)
    with untouched(model, params), torch.enable_grad():
        value = loss()
        grads_P, used_P = _gradients(value, params)
        # the coarsest dtype limits the precision of a product and of a difference
        epsilon = max(torch.finfo(p.dtype).eps for p in used_P)
        start = _random(used_P, seed)

        def times(vector: Tensor) -> Tensor:
            product = _flat(_times_hessian(grads_P, used_P, _split(vector, used_P)), like=vector)
            if not math.isfinite(to_float(product.sum())):
                raise GradwatchError(NOT_FINITE)
            return product

        found = largest_eigenvalue(times, start, max_products=max_products - 1, tolerance=tolerance, epsilon=epsilon)
        # the random vector finds a mistake outside the eigenvector; the eigenvector outweighs the kinks
        direction = start / torch.linalg.vector_norm(start) + found.vector
        product_P = _split(times(direction), used_P)
    direction_P = _split(direction, used_P)
    _check_product(
        lambda step: _gradients_at(model, loss, used_P, direction_P, step),
        [g.detach() for g in grads_P],
        product_P,
        steps=_steps(used_P, direction_P, epsilon),
        epsilon=epsilon,
    )
    if not any(g.requires_grad for g in grads_P):
        raise GradwatchError("curvature: the loss is linear in every parameter, so it has no curvature")
    return Curvature(
        sharpness=found.value,
        error=found.error,
        products=found.products + 1,
        converged=found.converged,
        loss=to_float(value.detach()),
    )


def _check_arguments(params: Sequence[Tensor], max_products: int) -> None:
    if max_products < MIN_PRODUCTS:
        raise GradwatchError(f"curvature: max_products is {max_products}, expected at least {MIN_PRODUCTS}")
    # autograd's products of complex parameters are those of no symmetric matrix
    if complex_dtype := next((p.dtype for p in params if p.is_complex()), None):
        raise GradwatchError(
            f"curvature: a parameter has dtype {complex_dtype}, expected real parameters; "
            "keep the real and the imaginary part as two parameters, or set requires_grad to False"
        )


def _gradients(value: Tensor, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients, with their graph if they have one, and the parameters that the loss depends on."""
    if not value.requires_grad or not params:
        raise GradwatchError("curvature: the loss depends on no trainable parameter of the model, expected a graph")
    if not math.isfinite(number := to_float(value.detach())):
        raise GradwatchError(f"curvature: the loss is {number}, expected a finite number; gradwatch.locate says why")
    # with a graph, to differentiate again; unused parameters have no curvature
    found = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
    pairs = [(g, p) for g, p in zip(found, params, strict=True) if g is not None]
    return [g for g, _ in pairs], [p for _, p in pairs]


def _times_hessian(grads_P: Sequence[Tensor], params: Sequence[Tensor], vector_P: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of the Hessian and a vector: the gradient of the gradients' product with the vector."""
    bent = [(g, v) for g, v in zip(grads_P, vector_P, strict=True) if g.requires_grad]  # the others are constant
    if not bent:
        return [torch.zeros_like(p) for p in params]
    grads, vectors = zip(*bent, strict=True)
    try:
        return [*torch.autograd.grad(grads, params, grad_outputs=vectors, retain_graph=True, materialize_grads=True)]
    except RuntimeError as error:
        raise GradwatchError(NO_SECOND_DERIVATIVE.format(error)) from error


def _check_product(
    gradients_at: Callable[[float], list[Tensor]],
    grads_P: Sequence[Tensor],
    product_P: Sequence[Tensor],
    *,
    steps: Sequence[float],
    epsilon: float,
) -> None:
    """Compare a product with the Hessian with central differences of gradients.

    Args:
        gradients_at: Returns the gradients at weights that are shifted by a multiple of the direction.
        grads_P: Gradients at the weights themselves.
        product_P: Product of the Hessian and the direction, by autograd.
        steps: The long and the short multiple for the differences. Agreement at either is enough; only the short one
            shows a disagreement, because a long one may reach beyond where the loss is smooth.
        epsilon: Epsilon of the dtype.

    Raises:
        GradwatchError: The disagreement is larger than rounding, kinks and higher derivatives explain.
    """
    by_autograd = _norm(product_P)
    slopes: list[list[Tensor]] = []
    for step in steps:
        above_P, below_P = gradients_at(step), gradients_at(-step)
        slopes.append([(a.double() - b.double()) / (2 * step) for a, b in zip(above_P, below_P, strict=True)])
        rounding = GRADIENT_ROUNDING_EPS * epsilon * _norm(grads_P) / step
        disagreement = _distance(slopes[-1], product_P)
        if disagreement <= MAX_DISAGREEMENT_FRAC * by_autograd + rounding:
            return
    # a kink on one side, a third derivative and random rounding make the slopes of the two sides differ
    sides_P = zip(above_P, grads_P, below_P, strict=True)
    asymmetry = _norm([(a.double() - 2 * g.double() + b.double()) / step for a, g, b in sides_P])
    # kinks on both sides and coarse rounding depend on the step, a wrong product does not
    spread = _distance(*slopes)
    by_gradients = _norm(slopes[-1])
    # otherwise the loss changes within less than the step, and the slope says nothing
    is_resolved = asymmetry + spread <= by_gradients / 2 + rounding
    unexplained = disagreement - asymmetry - spread - rounding
    if is_resolved and unexplained > MAX_DISAGREEMENT_FRAC * max(by_autograd, by_gradients):
        raise GradwatchError(
            "curvature: autograd's second derivative of the loss is wrong: a product with the Hessian has norm "
            f"{by_autograd:.3g} by autograd and {by_gradients:.3g} by differences of gradients, and the two are "
            f"{disagreement:.3g} apart. The loss probably uses a custom autograd Function whose backward leaves the "
            "graph (detach, NumPy, its own kernel): write that backward with differentiable torch operations. "
            "If there is none, check that `loss` computes the loss from the weights at each call"
        )


def _gradients_at(
    model: nn.Module,
    loss: Callable[[], Tensor],
    params: Sequence[Tensor],
    direction_P: Sequence[Tensor],
    step: float,
) -> list[Tensor]:
    """Return the gradients at shifted weights, and restore the weights."""
    kept_P = [p.detach().clone() for p in params]
    with untouched(model, params), torch.enable_grad():
        try:
            for p, direction in zip(params, direction_P, strict=True):
                p.data.add_(direction, alpha=step)  # data: a graph that somebody else still holds stays usable
            return [*torch.autograd.grad(loss(), params, retain_graph=True, materialize_grads=True)]
        finally:
            for p, kept in zip(params, kept_P, strict=True):
                p.data.copy_(kept)


def _steps(params: Sequence[Tensor], direction_P: Sequence[Tensor], epsilon: float) -> list[float]:
    size = (_norm(params) or 1.0) / _norm(direction_P)
    return [epsilon**exponent * size for exponent in STEP_EXPONENTS]


def _random(params: Sequence[Tensor], seed: int) -> Tensor:
    """Return a random vector for all parameters, on the device of the first one, at least as precise as float32."""
    generator = torch.Generator().manual_seed(seed)
    # on the CPU in float64, so that the vector is the same for every device and dtype
    drawn_P = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    return _flat(drawn_P, like=torch.empty(0, dtype=dtype, device=params[0].device))


def _flat(parts_P: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([part.to(like).flatten() for part in parts_P])


def _split(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    parts_P = vector.split([p.numel() for p in params])
    return [part.view(p.shape).to(p) for part, p in zip(parts_P, params, strict=True)]


def _dot(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return math.fsum(
        to_float(torch.vdot(a.double().flatten(), b.double().flatten())) for a, b in zip(a_P, b_P, strict=True)
    )


def _distance(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return _norm([a.double() - b.double() for a, b in zip(a_P, b_P, strict=True)])


def _norm(vector_P: Sequence[Tensor]) -> float:
    return math.sqrt(_dot(vector_P, vector_P))


def _stable_rate(sharpness: float) -> float:
    return STABLE / sharpness if sharpness > 0 else math.inf


def _factor(rate: float, bound: float) -> float:
    return max(rate / bound, bound / rate) if 0 < bound < math.inf and rate > 0 else math.inf
