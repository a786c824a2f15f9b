"""Check the gradient of a layer that solves for a fixed point: `gradwatch.check_fixed_point`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.compare import MAX_RIGHT_ERROR
from gradwatch.gradcheck.differences import slope
from gradwatch.gradcheck.implicit.fixed_point import MAX_DENSE_ELEMENTS, FixedPoint, Gradients, distance, errors
from gradwatch.gradcheck.implicit.result import FixedPointCheck, ImplicitGradient, Verdict
from gradwatch.gradcheck.stepping.reached_state import ReachedState
from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.gradcheck.stepping.tensors import inner, norm, random_like, scale_of

NO_FIXED_POINT = 1e-2
"""Relative residual from which the output is not a fixed point of the cell."""
RESIDUAL_FACTOR = 10.0
"""Factor of the error that a residual explains, within which a gradient counts as right."""
MAX_UNROLLED = 400
MAX_TERMS = 200
UNROLLED_ACCURACY = 1e-12
"""Accuracy to which the iterations are differentiated one by one."""
TINY = 1e-300
MATCH_TOLERANCE = 1e-6
"""Relative distance at which a gradient matches a known mistake, in addition to the effect of the residual."""


def check_fixed_point(
    layer: Callable[..., Any], *inputs: Tensor, cell: Callable[..., Any], model: nn.Module | None = None
) -> FixedPointCheck:
    """Check whether the gradient of a layer that solves z = cell(z, *inputs) is right, and how well it solves.

    In float64, the layer's own gradient is compared with the gradient by the implicit function theorem at the fixed
    point. The gradient through all iterations, and differences of the solution, show whether the latter is right. A
    wrong gradient is named if it matches a known mistake: the adjoint solve is skipped, stops early, or uses the
    Jacobian without transposing it. Weights, buffers and gradients are restored afterwards.

    Args:
        layer: Function or module of the inputs that returns the fixed point, a tensor.
        inputs: Its inputs; of those that require a gradient, the gradient is checked too.
        cell: One iteration: a function of the state and the inputs that returns the next state. It uses the weights of
            the layer and has no randomness.
        model: Module with the weights. If None, the modules that layer and cell hold.

    Returns:
        The verdict, the residual, the contraction, and the gradient of each tensor, computed in three ways.

    Raises:
        GradwatchError: The output is not a tensor, or the cell returns another shape, or nothing requires a gradient.
    """
    if isinstance(layer, nn.Module) and model is None:
        model = layer
    dtype, residual = _in_its_format(layer, inputs, cell, model)
    step = CheckedStep(layer, inputs, model=model, functions=(layer, cell))
    try:
        return _checked(step, layer, FixedPoint(step, cell), dtype, residual)
    finally:
        step.restore()


def _in_its_format(
    layer: Callable[..., Any], inputs: tuple[Tensor, ...], cell: Callable[..., Any], model: nn.Module | None
) -> tuple[torch.dtype, float]:
    """Return the format of the layer's output and its relative residual in it."""
    before = ReachedState(model, layer, cell)
    try:
        with torch.no_grad():
            state = layer(*inputs)
            if not isinstance(state, Tensor):
                got = type(state).__name__
                raise GradwatchError(f"check_fixed_point: the layer returned {got}, expected the fixed point, a tensor")
            after = cell(state, *inputs)
            if not isinstance(after, Tensor) or after.shape != state.shape:
                got = str(tuple(after.shape)) if isinstance(after, Tensor) else type(after).__name__
                raise GradwatchError(f"check_fixed_point: the cell returned {got}, expected {tuple(state.shape)}")
            return state.dtype, norm(after - state) / max(norm(state), TINY)
    finally:
        before.restore()


def _checked(
    step: CheckedStep, layer: Callable[..., Any], point: FixedPoint, dtype: torch.dtype, residual: float
) -> FixedPointCheck:
    """Compare the gradients in float64."""
    with step.placed(), torch.enable_grad():
        output = layer(*step.batch)
        if not output.requires_grad:
            raise GradwatchError("check_fixed_point: the layer returned a tensor without a graph; look for no_grad()")
        weights = random_like(output.detach(), torch.Generator().manual_seed(1))
        own = point.gradients(output, weights)
        state = output.detach()
        exact_residual = point.residual(state)
        solution, reached = point.solve(state)
        radius, largest = point.contraction(solution)
        right = point.by_leaf(solution, point.adjoint(solution, weights))
        iterations = _iterations(radius, UNROLLED_ACCURACY)
        unrolled = None
        if iterations <= MAX_UNROLLED:
            unrolled = errors(point.unrolled(torch.zeros_like(state), weights, math.ceil(iterations)), right)
        # the residual bounds the errors of the state and the gradient, amplified by 1 / (1 - contraction)
        tolerance = max(MAX_RIGHT_ERROR, RESIDUAL_FACTOR * exact_residual / max(1e-3, 1 - min(radius, 1.0)))
        off = errors(own, right)
        kind, text = _named(point, solution, weights, own, right, tolerance)
    verdict: Verdict = "wrong" if max(off.values()) > tolerance else "right"
    if exact_residual > NO_FIXED_POINT or reached > MATCH_TOLERANCE:
        verdict, kind = "cannot tell", ""
        change = f"one more iteration changes it by {100 * exact_residual:.2g} %"
        text = f"the output is not a fixed point of the cell: {change}"
    gradients = [
        ImplicitGradient(
            name=name,
            error=error,
            unrolled=unrolled[name] if unrolled else math.nan,
            numeric=_by_differences(step, point, state, weights, name, right[name]),
        )
        for name, error in off.items()
    ]
    return FixedPointCheck(
        verdict=verdict,
        kind=kind,
        text=text,
        format=str(dtype).removeprefix("torch."),
        residual=residual,
        exact_residual=exact_residual,
        contraction=radius,
        norm=largest,
        iterations=_iterations(radius, torch.finfo(dtype).eps),
        tolerance=tolerance,
        gradients=tuple(sorted(gradients, key=lambda g: -g.error)),
    )


def _iterations(radius: float, accuracy: float) -> float:
    """Return the number of iterations for a relative accuracy, infinite if an iteration does not contract."""
    if radius >= 1:
        return math.inf
    return max(1.0, math.log(accuracy) / math.log(radius)) if radius > 0 else 1.0


def _named(
    point: FixedPoint, solution: Tensor, weights: Tensor, own: Gradients, right: Gradients, tolerance: float
) -> tuple[str, str]:
    """Return kind and sentence of a wrong gradient: a known mistake, or the tensors concerned."""
    off, near = distance(own, right), max(MATCH_TOLERANCE, tolerance)
    if off <= tolerance:
        return "", ""
    size = f"the gradient is off by {100 * off:.2g} %"
    total = torch.zeros_like(weights)
    for count, term in zip(range(MAX_TERMS), point.terms(solution, weights), strict=False):
        total = total + term
        if distance(own, point.by_leaf(solution, total)) <= near:
            if count == 0:
                return "skipped-solve", f"the backward skips the adjoint solve and differentiates one iteration: {size}"
            plural = "s" if count > 1 else ""
            return "early-stop", f"the backward stops the adjoint solve after {count} iteration{plural}: {size}"
    if distance({n: -g for n, g in own.items()}, right) <= near:
        return "sign", "the gradient has the wrong sign"
    if solution.numel() <= MAX_DENSE_ELEMENTS:
        jacobian = point.jacobian(solution)
        for kind, matrix, mistake in (
            ("transposed", jacobian, "solves with the Jacobian instead of its transpose"),
            ("solve-sign", -jacobian.T, "adds the Jacobian where it subtracts it, or the reverse"),
        ):
            if distance(own, point.by_leaf(solution, point.adjoint_by(matrix, weights))) <= near:
                return kind, f"the adjoint solve {mistake}: {size}"
    wrong = [f"`{n}`" for n, error in errors(own, right).items() if error > tolerance]
    return "", f"the gradient of {', '.join(wrong)} is off by up to {100 * off:.2g} %"


def _by_differences(
    step: CheckedStep, point: FixedPoint, state: Tensor, weights: Tensor, name: str, grad: Tensor
) -> float:
    """Return the relative error of a gradient against differences of the solution along one direction."""
    leaf = step.home.leaves[name]
    shift = scale_of(leaf) * random_like(leaf, torch.Generator().manual_seed(2))
    analytic, typical = inner(grad, shift), norm(grad) * norm(shift) / math.sqrt(leaf.numel())

    def solved(multiple: float) -> float:
        with step.placed({name: shift}, multiple):
            return inner(weights, point.solve(state)[0])

    found = slope(solved, typical=typical, expected=analytic)
    return abs(analytic - found.value) / max(abs(analytic), abs(found.value), typical, TINY)
