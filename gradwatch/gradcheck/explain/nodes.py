"""Check one call of a custom Function by itself: its backward against differences of its forward."""

# E = elements of one argument that were looked at

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.gradcheck.compare import MAX_RIGHT_ERROR, MIN_WRONG_ERROR
from gradwatch.gradcheck.differences import kink, slope
from gradwatch.gradcheck.stepping.function_calls import RecordedCall
from gradwatch.gradcheck.stepping.tensors import copied, inner, is_continuous, norm, random_like, scale_of
from gradwatch.state.rng import set_random_state

MAX_ELEMENTS = 400
"""Elements of an argument that are differentiated one by one; of a larger one, this many at random."""
REFUSAL = "Error"
"""Class of the node that `once_differentiable` puts where the graph would be."""


@final
@dataclass(slots=True, eq=False)
class WrongArgument:
    """An argument of a call whose gradient is not the derivative of the forward.

    Args:
        call: The call.
        index: Position of the argument.
        elements_E: Positions in the flattened argument.
        analytic_E: Gradient by backward.
        numeric_E: Gradient by differences.
        is_step: Whether the forward does not change with the argument: a step function.
    """

    call: RecordedCall
    index: int
    elements_E: Tensor
    analytic_E: Tensor
    numeric_E: Tensor
    is_step: bool

    @property
    def value(self) -> Tensor:
        """Return the argument."""
        found: Tensor = self.call.args[self.index]
        return found

    @property
    def is_complete(self) -> bool:
        """Return whether every element was looked at."""
        return len(self.elements_E) == self.value.numel()

    @property
    def right_E(self) -> Tensor:
        """Return which elements are right."""
        size = max(float(self.numeric_E.abs().max()), float(self.analytic_E.abs().max()))
        return (self.analytic_E - self.numeric_E).abs() <= 1e-4 * self.numeric_E.abs() + 1e-7 * size

    @property
    def ratio(self) -> float:
        """Return backward over the right gradient where it is one number for all elements, else nan."""
        return constant_ratio(self.analytic_E, self.numeric_E)


def constant_ratio(a_E: Tensor, b_E: Tensor) -> float:
    """Return c with a = c b, or nan."""
    if a_E.is_complex() or b_E.is_complex():
        a_E, b_E = (
            torch.view_as_real(a_E.to(torch.complex128)).flatten(),
            torch.view_as_real(b_E.to(torch.complex128)).flatten(),
        )
    square = float((b_E * b_E).sum())
    if not square or not math.isfinite(square):
        return math.nan
    c = float((a_E * b_E).sum()) / square
    rest = float((a_E - c * b_E).norm())
    return c if rest <= 1e-4 * max(abs(c) * float(b_E.norm()), float(a_E.norm())) else math.nan


class NodeCheck:
    """Evaluate calls of custom Functions again, with their recorded arguments.

    Args:
        generator: Source of the directions.
        epsilon: Epsilon of the format.
    """

    def __init__(self, generator: torch.Generator, epsilon: float) -> None:
        self._generator = generator
        self._epsilon = epsilon

    def wrong_arguments(self, call: RecordedCall) -> list[WrongArgument]:
        """Return the arguments with a wrong gradient in the step as it ran."""
        if not call.ran_backward:
            return []
        return [
            wrong
            for i, (value, needed) in enumerate(zip(call.args, call.needs, strict=True))
            if needed and is_continuous(value) and value.numel() and (wrong := self._wrong(call, i)) is not None
        ]

    def agrees(self, call: RecordedCall, i: int, grad: Tensor | None) -> bool:
        """Return whether a gradient of an argument agrees with differences along one direction."""
        return self.distance(call, i, grad) == 0.0

    def distance(self, call: RecordedCall, i: int, grad: Tensor | None) -> float:
        """Return the relative error of a gradient along one direction; 0 if rounding or a kink explains it."""
        value = call.args[i]
        shift = scale_of(value) * random_like(value, self._generator)
        analytic = 0.0 if grad is None else inner(grad, shift)
        function = _along(call, i, shift)
        typical = 0.0 if grad is None else norm(grad) * norm(shift) / math.sqrt(value.numel())
        found = slope(function, typical=typical, epsilon=self._epsilon)
        size = max(abs(analytic), abs(found.value), typical)
        difference = abs(analytic - found.value)
        if difference <= MAX_RIGHT_ERROR * size + 10 * found.error:
            return 0.0
        if kink(function, at=function(0.0), typical=size, epsilon=self._epsilon):
            return 0.0
        return difference / size

    def has_right_second(self, call: RecordedCall) -> bool | None:
        """Return whether autograd differentiates the backward of a call as differences of its gradients do.

        Both the arguments and the gradients that backward gets are moved. None if autograd refuses.
        """
        values = [a for a, n in zip(call.args, call.needs, strict=True) if n]
        incoming = [g for g in call.grad_outputs or () if isinstance(g, Tensor)]
        shifts = [scale_of(v) * random_like(v, self._generator) for v in (*values, *incoming)]
        weights = [random_like(v, self._generator) for v in values]

        def product(multiple: float, *, with_graph: bool = False) -> tuple[float, float]:
            moved = [v + multiple * shift for v, shift in zip((*values, *incoming), shifts, strict=True)]
            leaves = [m.requires_grad_() for m in moved]
            inner_args, inner_grads = iter(leaves[: len(values)]), iter(leaves[len(values) :])
            args = [next(inner_args) if n else a for a, n in zip(call.args, call.needs, strict=True)]
            grads_out = [next(inner_grads) if isinstance(g, Tensor) else g for g in call.grad_outputs or ()]
            grads = _gradients(call, args, leaves[: len(values)], grads_out, with_graph=with_graph)
            pairs = [(w, g) for w, g in zip(weights, grads, strict=True) if g is not None]
            if any(type(g.grad_fn).__name__ == REFUSAL for _, g in pairs):
                raise RuntimeError("once_differentiable")  # as torch does, unless it is asked for some gradients alone
            value = math.fsum(inner(w, g) for w, g in pairs)
            graphs = [
                (w.conj() * g).real.sum() if g.is_complex() else (w * g).sum() for w, g in pairs if g.requires_grad
            ]
            if not with_graph or not graphs:
                return value, 0.0
            found = torch.autograd.grad(torch.stack(graphs).sum(), leaves, allow_unused=True)
            return value, math.fsum(inner(g, s) for g, s in zip(found, shifts, strict=True) if g is not None)

        try:
            value, analytic = product(0.0, with_graph=True)
        except RuntimeError:
            return None
        by_differences = slope(lambda m: product(m)[0], typical=abs(analytic) + abs(value), epsilon=self._epsilon)
        size = max(abs(analytic), abs(by_differences.value))
        return abs(analytic - by_differences.value) <= MIN_WRONG_ERROR * size + 10 * by_differences.error

    def _wrong(self, call: RecordedCall, i: int) -> WrongArgument | None:
        grad = call.gradient(i)
        if self.agrees(call, i, grad) and self.agrees(call, i, grad):
            return None
        value = call.args[i]
        count = value.numel()
        chosen_E = torch.arange(count)
        if count > MAX_ELEMENTS:
            chosen_E = torch.randperm(count, generator=self._generator)[:MAX_ELEMENTS].sort().values
        analytic = torch.zeros_like(value).reshape(-1) if grad is None else grad.reshape(-1)
        typical = norm(analytic) / math.sqrt(count)
        kept, numeric, flat = [], [], 0
        for e in chosen_E.tolist():
            found = self._element(call, i, e, typical)
            if found is None:
                continue  # a kink
            kept.append(e)
            numeric.append(found[0])
            flat += found[1]
        if not kept:
            return None
        kept_E = torch.tensor(kept)
        numeric_E = torch.tensor(numeric, dtype=analytic.dtype)
        is_step = flat == len(kept) and bool((analytic[kept_E] != 0).any())
        wrong = WrongArgument(call, i, kept_E, analytic[kept_E], numeric_E, is_step)
        return None if bool(wrong.right_E.all()) and wrong.is_complete else wrong

    def _element(self, call: RecordedCall, i: int, e: int, typical: float) -> tuple[Any, bool] | None:
        """Return the derivative by one element, and whether nothing changed; None at a kink."""
        value = call.args[i]
        parts: list[float] = []
        flat = True
        for unit in (1.0, 1.0j) if value.is_complex() else (1.0,):
            shift = torch.zeros(value.numel(), dtype=value.dtype)
            shift[e] = torch.tensor(unit * scale_of(value), dtype=value.dtype)
            function = _along(call, i, shift.view(value.shape))
            found = slope(function, typical=typical * scale_of(value), epsilon=self._epsilon)
            size = max(abs(found.value), typical * scale_of(value))
            if kink(function, at=function(0.0), typical=size, epsilon=self._epsilon):
                return None
            parts.append(found.value / scale_of(value))
            flat = flat and found.flat
        return (complex(*parts) if len(parts) == 2 else parts[0]), flat


def _along(call: RecordedCall, i: int, shift: Tensor) -> Callable[[float], float]:
    """Return the outputs of a call, weighted with the gradients that backward got, along a shift of one argument."""

    def value(multiple: float) -> float:
        args = list(copied(call.args))
        if 0 in args[i].stride():  # several elements share their memory
            args[i] = args[i] + multiple * shift
        else:
            args[i].add_(shift, alpha=multiple)
        set_random_state(call.random)
        with torch.no_grad():
            outputs = _results(call, args)
        pairs = zip(outputs, call.grad_outputs or (), strict=False)
        return math.fsum(inner(g, o) for o, g in pairs if isinstance(g, Tensor) and isinstance(o, Tensor))

    return value


def _results(call: RecordedCall, args: Sequence[Any]) -> tuple[Any, ...]:
    result = call.function.apply(*args)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _gradients(
    call: RecordedCall,
    args: Sequence[Any],
    leaves: Sequence[Tensor],
    grads_out: Sequence[Any],
    *,
    with_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Return the gradients of some arguments, for the gradients that backward gets."""
    set_random_state(call.random)
    with torch.enable_grad():
        pairs = [
            (o, g if g.shape == o.shape else torch.ones_like(o))
            for o, g in zip(_results(call, [*map(writable, args)]), grads_out, strict=False)
            if isinstance(o, Tensor) and o.requires_grad and isinstance(g, Tensor)
        ]
        if not pairs or not leaves:
            return [None] * len(leaves)
        outs, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(outs, leaves, grads, create_graph=with_graph, allow_unused=True)


def again(call: RecordedCall, *, factor: float = 1.0, contiguous: bool = False) -> list[Tensor | None]:
    """Apply a Function outside of the step, and return the gradients of its arguments.

    Args:
        call: The recorded call.
        factor: Factor of the gradients that backward gets.
        contiguous: Whether to give the arguments contiguous memory.
    """
    copies = [_leaf(a, needed, contiguous) for a, needed in zip(copied(call.args), call.needs, strict=True)]
    wanted = [a for a in copies if isinstance(a, Tensor) and a.requires_grad]
    grads_out = [g * factor if isinstance(g, Tensor) else g for g in call.grad_outputs or ()]
    found = iter(_gradients(call, copies, wanted, grads_out))
    return [next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in copies]


def writable(value: Any) -> Any:
    """Return a leaf as a result of an operation, into which a Function with `mark_dirty` may write."""
    is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return value.clone() if is_leaf and value.is_contiguous() else value


def _leaf(value: Any, needed: bool, contiguous: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.contiguous() if contiguous else value
    return value.requires_grad_() if needed else value
