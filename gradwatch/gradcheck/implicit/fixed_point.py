"""Solve for the fixed point of a cell, differentiate it implicitly and by unrolling, and measure how it contracts."""

# N = elements of the state

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.gradcheck.stepping.tensors import norm

MAX_RESIDUAL = 1e-14
"""Relative residual at which a solution counts as exact, in float64."""
MAX_ITERATIONS = 2000
MAX_NEWTON = 20
MAX_DENSE_ELEMENTS = 600
"""Largest number of elements of a state whose Jacobian is built as a matrix."""
POWER_ITERATIONS = 60

Gradients = dict[str, Tensor]


@final
class FixedPoint:
    """The equation z = cell(z, *batch) of a step, with the weights and the batch that the step holds.

    Every method works inside of `step.placed`.

    Args:
        step: Holds the leaves: parameters, and inputs that require a gradient.
        cell: Function of the state and the batch that returns the next state.
    """

    def __init__(self, step: CheckedStep, cell: Callable[..., Any]) -> None:
        self.step = step
        self._cell = cell

    def next(self, state: Tensor) -> Tensor:
        """Return the state after one iteration."""
        found: Tensor = self._cell(state, *self.step.batch)
        return found

    def residual(self, state: Tensor) -> float:
        """Return the distance of a state from the next one, relative to its norm."""
        with torch.no_grad():
            return norm(self.next(state) - state) / max(norm(state), 1e-300)

    def solve(self, state: Tensor) -> tuple[Tensor, float]:
        """Return the fixed point near a state, and its relative residual: by iteration, or else by Newton's method."""
        with torch.no_grad():
            start = state
            for _ in range(MAX_ITERATIONS):
                after = self.next(state)
                gap = norm(after - state) / max(norm(after), 1e-300)
                state = after
                if gap <= MAX_RESIDUAL or not math.isfinite(gap):
                    break
        if gap > math.sqrt(MAX_RESIDUAL) and state.numel() <= MAX_DENSE_ELEMENTS:
            state = start
            for _ in range(MAX_NEWTON):
                jacobian = self.jacobian(state)
                with torch.no_grad():
                    gaps = (self.next(state) - state).reshape(-1)
                    move = torch.linalg.solve(jacobian - torch.eye(len(gaps), dtype=gaps.dtype), gaps)
                    state = state - move.reshape(state.shape)
                if norm(move) <= MAX_RESIDUAL * norm(state):
                    break
        return state, self.residual(state)

    def jacobian(self, state: Tensor) -> Tensor:
        """Return the derivative of the next state by the state, of shape (N, N)."""
        point = state.detach().requires_grad_()
        with torch.enable_grad():
            after = self.next(point)
        rows = []
        for unit in torch.eye(after.numel(), dtype=after.dtype, device=after.device):
            (row,) = torch.autograd.grad(after, point, unit.reshape(after.shape), retain_graph=True)
            rows.append(row.reshape(-1))
        return torch.stack(rows)

    def terms(self, state: Tensor, weights: Tensor) -> Iterator[Tensor]:
        """Yield the terms of the adjoint series: the weights, then the product of each term with the Jacobian.

        Their sum is the solution of the adjoint equation.
        """
        point = state.detach().requires_grad_()
        with torch.enable_grad():
            after = self.next(point)
        term = weights
        while True:
            yield term
            (term,) = torch.autograd.grad(after, point, term, retain_graph=True)

    def contraction(self, state: Tensor) -> tuple[float, float]:
        """Return spectral radius and largest singular value of the Jacobian; the second is nan if N is large."""
        if state.numel() <= MAX_DENSE_ELEMENTS:
            jacobian = self.jacobian(state)
            return float(torch.linalg.eigvals(jacobian).abs().max()), float(torch.linalg.matrix_norm(jacobian, 2))
        generator = torch.Generator().manual_seed(0)
        terms = self.terms(state, torch.randn(state.shape, generator=generator, dtype=state.dtype))
        norms = [norm(next(terms)) for _ in range(POWER_ITERATIONS)]
        half = POWER_ITERATIONS // 2
        return (norms[-1] / norms[half]) ** (1 / (POWER_ITERATIONS - 1 - half)) if norms[half] else 0.0, math.nan

    def adjoint(self, state: Tensor, weights: Tensor) -> Tensor:
        """Return the solution of the adjoint equation: w = weights + transposed Jacobian times w."""
        if state.numel() <= MAX_DENSE_ELEMENTS:
            return self.adjoint_by(self.jacobian(state).T, weights)
        total = torch.zeros_like(weights)
        for count, term in enumerate(self.terms(state, weights)):
            total = total + term
            if norm(term) <= MAX_RESIDUAL * norm(total) or count > MAX_ITERATIONS:
                break
        return total

    def adjoint_by(self, matrix: Tensor, weights: Tensor) -> Tensor:
        """Return the solution of w = weights + matrix times w."""
        unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        solution: Tensor = torch.linalg.solve(unit - matrix, weights.reshape(-1))
        return solution.reshape(weights.shape)

    def by_leaf(self, state: Tensor, adjoint: Tensor) -> Gradients:
        """Return the gradients of the leaves for a solution of the adjoint equation."""
        with torch.enable_grad():
            after = self.next(state.detach())
        return self.gradients(after, adjoint)

    def unrolled(self, start: Tensor, weights: Tensor, iterations: int) -> Gradients:
        """Return the gradients of the leaves through a number of iterations."""
        state = start.detach()
        with torch.enable_grad():
            for _ in range(iterations):
                state = self.next(state)
        return self.gradients(state, weights)

    def gradients(self, result: Tensor, weights: Tensor) -> Gradients:
        """Return the gradients of the leaves for a weighted sum of a result."""
        leaves = self.step.leaves
        found = torch.autograd.grad(result, list(leaves.values()), weights, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), found, strict=True)
        }


def errors(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each gradient; one that is almost 0 counts by the largest one."""
    floor = max(1e-9 * max((norm(g) for g in right.values()), default=0.0), 1e-300)
    return {name: norm(found[name] - grad) / max(norm(grad), floor) for name, grad in right.items()}


def distance(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of some gradients."""
    return max(errors(found, right).values(), default=0.0)
