"""The sharpest curvature of a loss: the largest eigenvalue of its Hessian, by power iteration, against 2 / rate."""

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """What power iteration found.

    Args:
        sharpness: Eigenvalue of the Hessian that is largest in magnitude; negative where the loss bends down most.
        iterations: Products of the Hessian with a vector that it took.
        change: Relative change of the eigenvalue in the last of them.
        loss: The loss at these weights, on this batch.
        largest_rate: 2 / sharpness, the largest stable rate of plain gradient descent; infinite where nothing bends up.
    """

    sharpness: float
    iterations: int
    change: float
    loss: float

    @property
    def largest_rate(self) -> float:
        """The largest stable learning rate of plain gradient descent."""
        return STABLE / self.sharpness if self.sharpness > 0 else math.inf

    def verdict(self, rate: float) -> str:
        """Return one sentence on a learning rate.

        Args:
            rate: Of plain gradient descent. Momentum b allows 1 + b times more; Adam divides by its own denominator
                first, so that for Adam only the curvature's growth over a run can be compared.
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
    """Measure the sharpest curvature of a loss at the weights that a model has.

    Each iteration multiplies a vector with the Hessian, which takes about two backward passes (Pearlmutter 1994). The
    vector starts at random, from a generator of its own, and turns towards the eigenvector. What was there stays as it
    was: gradients, weights, buffers, modes, and the state of all generators.

    Args:
        model: Whose trainable parameters the Hessian is taken over.
        loss: Computes the loss of one fixed batch from the model, with its graph; called once.
        iterations: Most products.
        tolerance: Relative change of the eigenvalue at which to stop.
        seed: Of the first vector.

    Raises:
        GradwatchError: The loss depends on no trainable parameter, or an operation in it has no second derivative.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with _untouched(model, params), torch.enable_grad():
        value = loss()
        grads_P, used_P = _gradients(value, params)
        vector_P = _normalised(_random(used_P, seed))
        sharpness, change, done = 0.0, math.inf, 0
        while done < iterations and change > tolerance:
            product_P = _times_hessian(grads_P, used_P, vector_P)
            before, sharpness = sharpness, _dot(product_P, vector_P)
            change = abs(sharpness - before) / abs(sharpness) if sharpness else 0.0
            vector_P = _normalised(product_P)
            done += 1
        return Curvature(sharpness=sharpness, iterations=done, change=change, loss=to_float(value.detach()))


def _gradients(value: Tensor, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients with their graph, and the parameters that have one."""
    if not value.requires_grad or not params:
        raise GradwatchError("curvature: the loss depends on no trainable parameter of the model, expected a graph")
    found = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
    pairs = [(g, p) for g, p in zip(found, params, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        raise GradwatchError("curvature: the loss is linear in every parameter, so that it bends nowhere")
    return [g for g, _ in pairs], [p for _, p in pairs]


def _times_hessian(grads_P: Sequence[Tensor], params: Sequence[Tensor], vector_P: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of the Hessian and a vector: the gradient of their gradients' product with the vector."""
    try:
        found = torch.autograd.grad(grads_P, params, grad_outputs=list(vector_P), retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise GradwatchError(f"curvature: an operation of the loss has no second derivative: {error}") from error
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


def _random(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in params]


def _dot(a_P: Sequence[Tensor], b_P: Sequence[Tensor]) -> float:
    return math.fsum(
        to_float(torch.vdot(a.double().flatten(), b.double().flatten())) for a, b in zip(a_P, b_P, strict=True)
    )


def _normalised(vector_P: Sequence[Tensor]) -> list[Tensor]:
    norm = math.sqrt(_dot(vector_P, vector_P))
    return [v / norm for v in vector_P] if norm > 0 else list(vector_P)


def _factor(rate: float, bound: float) -> float:
    return max(rate / bound, bound / rate) if 0 < bound < math.inf and rate > 0 else math.inf


@contextmanager
def _untouched(model: nn.Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Put back gradients, buffers and generators; a loss of one's own may call `backward` or train a normalisation."""
    kept: list[tuple[Tensor, Any]] = [(p, p.grad) for p in params]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = [p.device for p in params if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=devices):
        for p in params:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
