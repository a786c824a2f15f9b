"""Measure the sharpest curvature of a loss: the largest eigenvalue of its Hessian, by power iteration."""

# P = parameter tensors that the loss depends on

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float

STABLE = 2.0
"""Curvature times rate beyond which gradient descent overshoots; Cohen et al. 2021, arXiv:2103.00065, sec. 2."""
STEP_EXPONENTS = (1 / 3, 1 / 2)
"""Powers of the dtype's epsilon: the steps of a difference of gradients, relative to the norm of the weights.

1/3 balances rounding against the third derivative; 1/2 crosses fewer kinks of ReLUs.
"""
MAX_DISAGREEMENT_FRAC = 1e-3
"""Tolerated disagreement of autograd and a difference of gradients, relative to the product."""
GRADIENT_ROUNDING_EPS = 16
"""Rounding error of a gradient, in epsilons of its dtype, relative to its norm."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """The result of a power iteration.

    Args:
        sharpness: Eigenvalue of the Hessian with the largest magnitude; negative where the loss bends down most.
        iterations: Number of products of the Hessian with a vector.
        change: Relative change of the eigenvalue in the last iteration.
        loss: The loss at these weights, on this batch.
        largest_rate: 2 / sharpness, the largest stable rate of plain gradient descent; infinite where nothing bends up.
    """

    sharpness: float
    iterations: int
    change: float
    loss: float

    @property
    def largest_rate(self) -> float:
        """Return the largest stable learning rate of plain gradient descent."""
        return STABLE / self.sharpness if self.sharpness > 0 else math.inf

    def verdict(self, rate: float) -> str:
        """Return one sentence on a learning rate.

        Args:
            rate: Rate of plain gradient descent. Momentum b allows 1 + b times more. Adam divides by its own
                denominator first, so for Adam only the growth of the curvature over a run can be compared.
        """
        where = "above" if rate > self.largest_rate else "within"
        return (
            f"the sharpest curvature is {self.sharpness:.3g}: steps of plain gradient descent are stable up to a rate "
            f"of {self.largest_rate:.3g}; {rate:g} is {where} it, by a factor of {_factor(rate, self.largest_rate):.3g}"
        )


def curvature(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    iterations: int = 30,
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Curvature:
    """Measure the sharpest curvature of a loss at the current weights of a model.

    Each iteration multiplies a vector with the Hessian, which takes about two backward passes (Pearlmutter 1994). The
    vector starts at random, from a separate generator, and turns towards the eigenvector. One product is compared with
    a difference of gradients, because autograd treats a backward outside its graph as a constant. Gradients, weights,
    buffers, modes and the state of all generators stay unchanged.

    Args:
        model: Model with the trainable parameters of the Hessian.
        loss: Computes the loss of one fixed batch from the model, with its graph. It is called several times, also at
            slightly shifted weights, each time with the same buffers and the same state of torch's generators.
        iterations: Maximum number of products.
        tolerance: Relative change of the eigenvalue at which to stop.
        seed: Seed of the first vector.

    Returns:
        The curvature, with the number of iterations and the change in the last one.

    Raises:
        GradwatchError: The loss depends on no trainable parameter or is linear in each, or one of its operations has no
            second derivative or a wrong one.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with _untouched(model, params), torch.enable_grad():
        value = loss()
        grads_P, used_P = _gradients(value, params)
        start_P = vector_P = _normalised(_random(used_P, seed))
        sharpness, change, done = 0.0, math.inf, 0
        while done < iterations and change > tolerance:
            product_P = _times_hessian(grads_P, used_P, vector_P)
            before, sharpness = sharpness, _dot(product_P, vector_P)
            # an eigenvalue of 0 has no relative change: the iteration has converged
            change = abs(sharpness - before) / abs(sharpness) if sharpness else 0.0
            vector_P = _normalised(product_P)
            done += 1
        # the random vector finds a mistake outside the eigenvector; the eigenvector outweighs the kinks
        direction_P = [a + b for a, b in zip(start_P, vector_P, strict=True)]
        product_P = _times_hessian(grads_P, used_P, direction_P)
    # the coarsest dtype limits the precision of a difference
    epsilon = max(torch.finfo(p.dtype).eps for p in used_P)
    is_linear = not any(g.requires_grad for g in grads_P)
    _check_product(
        lambda step: _gradients_at(model, loss, used_P, direction_P, step),
        [g.detach() for g in grads_P],
        product_P,
        steps=_steps(used_P, direction_P, epsilon),
        epsilon=epsilon,
    )
    if is_linear:
        raise GradwatchError("curvature: the loss is linear in every parameter, so it has no curvature")
    return Curvature(sharpness=sharpness, iterations=done, change=change, loss=to_float(value.detach()))


def _gradients(value: Tensor, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients, with their graph if they have one, and the parameters that the loss depends on."""
    if not value.requires_grad or not params:
        raise GradwatchError("curvature: the loss depends on no trainable parameter of the model, expected a graph")
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
        raise GradwatchError(f"curvature: an operation of the loss has no second derivative: {error}") from error


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
    with _untouched(model, params), torch.enable_grad():
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


def _random(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # on the CPU in float64, so that the vector is the same for every device and dtype
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in params]


def _dot(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return math.fsum(
        to_float(torch.vdot(a.double().flatten(), b.double().flatten())) for a, b in zip(a_P, b_P, strict=True)
    )


def _distance(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return _norm([a.double() - b.double() for a, b in zip(a_P, b_P, strict=True)])


def _norm(vector_P: Sequence[Tensor]) -> float:
    return math.sqrt(_dot(vector_P, vector_P))


def _normalised(vector_P: Sequence[Tensor]) -> list[Tensor]:
    norm = _norm(vector_P)
    return [v / norm for v in vector_P] if norm > 0 else list(vector_P)


def _factor(rate: float, bound: float) -> float:
    return max(rate / bound, bound / rate) if 0 < bound < math.inf and rate > 0 else math.inf


@contextmanager
def _untouched(model: nn.Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Restore gradients, buffers and generators afterwards: a loss may call `backward` or train a normalization."""
    kept: list[tuple[Tensor, Any]] = [(p, p.grad) for p in params]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = list({p.device for p in params if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        for p in params:
            p.grad = None  # else a `backward` in the loss would add to the gradient in place
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
