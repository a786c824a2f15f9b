"""Name the mistake in the backward of a custom Function, from the pattern of its error and from experiments."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gradwatch.gradcheck.explain.nodes import NodeCheck, WrongArgument, again
from gradwatch.gradcheck.explain.repair import repair
from gradwatch.gradcheck.explain.substitution import substitution
from gradwatch.gradcheck.explain.wording import Named
from gradwatch.gradcheck.source import FunctionSource, calls, mentions, source_of, written
from gradwatch.gradcheck.stepping.function_calls import RecordedCall, method, tensors_of
from gradwatch.gradcheck.stepping.tensors import copied
from gradwatch.probe.place import Place

TEMPERATURES = ("temp", "tau")
MIN_WRONG_FRAC = 0.8
"""Fraction of wrong elements from which the whole group counts as wrong."""
RATIO_TOLERANCE = 1e-3
"""Maximum relative distance of a ratio from a known number."""
LARGE, MIN_DECREASE = 100.0, 5.0
"""Factor of the inputs at which an epsilon has no effect, and the minimum decrease of the error."""
MAX_EPSILON = 0.2


@final
@dataclass(frozen=True, slots=True)
class _WrongCall:
    """A call with a wrong gradient.

    Args:
        call: The call.
        wrong: Its arguments with a wrong gradient, not empty.
        nodes: Judges gradients of the call.
    """

    call: RecordedCall
    wrong: Sequence[WrongArgument]
    nodes: NodeCheck

    def source(self, name: str = "backward") -> FunctionSource:
        """Return the source of a method of the Function."""
        return source_of(method(self.call.function, name))

    def maker(self, wrong: Sequence[WrongArgument] | None = None, right: Sequence[int] = ()) -> Place:
        """Return the statement of backward that makes the gradients of the wrong arguments, and not of right ones."""
        return self.source().maker([w.index for w in wrong or self.wrong], right)

    def is_right(self, grads: Sequence[Tensor | None], call: RecordedCall | None = None) -> bool:
        """Return whether gradients of this call, or of another one of the Function, agree with differences."""
        return all(self.nodes.agrees(call or self.call, w.index, grads[w.index]) for w in self.wrong)

    def repaired(self) -> Named | None:
        """Return the mistake whose repair in the source of backward makes the gradients right."""
        return repair(self.call.function, lambda: self.is_right(again(self.call)))

    def only(self, otherwise: Place, test: Callable[[ast.stmt], bool]) -> Place:
        """Return the only statement of backward that passes a test, else another place."""
        source = self.source()
        found = source.simple(test)
        return source.place(found[0]) if len(found) == 1 else otherwise


def name_mistake(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, modules: Sequence[nn.Module]
) -> Named:
    """Return the mistake in the backward of a call.

    Args:
        call: The call.
        wrong: Its arguments with a wrong gradient, not empty.
        nodes: Judges gradients of the call.
        modules: Modules of the step, to recognize buffers.
    """
    bad = _WrongCall(call, wrong, nodes)
    right = [i for i, n in enumerate(call.needs) if n and all(w.index != i for w in wrong)]
    first = wrong[0]
    missing = [w for w in wrong if not bool((w.analytic_E != 0).any())]
    if missing:
        return Named("missing_grad", bad.maker(missing[:1], right), 0.0)
    for experiment in (_in_step_only, _by_layout, _ignores_grad, _writes_what_it_differentiates):
        if (found := experiment(bad)) is not None:
            return found
    made, ratio = bad.maker(right=right), first.ratio
    if math.isfinite(ratio):
        kind, fixed = _kind_of_ratio(call, wrong, ratio), bad.repaired()
        if fixed is None:
            return Named(kind, made, ratio)
        if kind == "factor" and len(wrong) > 1:
            return Named(kind, fixed.place, ratio)
        is_of_kind = fixed.kind in (kind, "bias_mean", "sign")
        return Named(fixed.kind, fixed.place, ratio) if is_of_kind else Named(kind, made, ratio)
    if _is_transposed(first):
        return Named("transposed", bad.only(made, lambda s: calls(s, ("t", "mm", "matmul", "transpose"))))
    if (swap := substitution(call, bad.is_right, modules)) is not None:
        kind = "stale" if _writes(call, lambda needed: not needed) else swap.kind
        return Named(kind, swap.place or made)
    fixed = bad.repaired()
    if fixed is not None and fixed.kind != "factor":
        return fixed
    found = _by_pattern(bad, fixed.place if fixed else made)
    return Named("factor", found.place) if found.kind == "missing_term" and fixed else found


def detaching_line(function: type[Function]) -> Place:
    """Return the line of a backward that takes a value out of the graph, or no line."""
    source = source_of(method(function, "backward"))
    cuts = source.simple(lambda s: calls(s, ("detach", "item", "numpy", "tolist")) or mentions(s, ("data",)))
    return source.place(cuts[0] if cuts else None)


def backward_line(function: type[Function]) -> Place:
    """Return the line of a backward that returns its gradients, or no line."""
    source = source_of(method(function, "backward"))
    returns = source.returned()
    return source.place(returns[-1][0] if returns else None)


def _in_step_only(bad: _WrongCall) -> Named | None:
    """Return a mistake that appears only inside the step: something changed between forward and backward."""
    try:
        if not bad.is_right(again(bad.call)):
            return None
    except RuntimeError:
        return None
    is_changed = any(
        isinstance(now, Tensor) and not torch.equal(now.detach(), before)
        for now, before in zip(bad.call.given, bad.call.args, strict=True)
    )
    return Named("inplace" if is_changed else "stale", bad.maker())


def _by_layout(bad: _WrongCall) -> Named | None:
    tensors = [*tensors_of(bad.call.args), *tensors_of(bad.call.grad_outputs)]
    if all(t.is_contiguous() for t in tensors) or not bad.is_right(again(bad.call, contiguous=True)):
        return None
    words = ("view", "as_strided", "storage", "data_ptr", "reshape", "stride", "untyped_storage", "contiguous", "ravel")
    for source in (bad.source(), bad.source("forward")):
        if found := source.simple(lambda s: calls(s, words)):
            return Named("layout", source.place(found[-1]))
    return Named("layout", bad.maker())


def _ignores_grad(bad: _WrongCall) -> Named | None:
    once, twice = again(bad.call), again(bad.call, factor=2.0)
    for w in bad.wrong:
        a, b = once[w.index], twice[w.index]
        if a is None or b is None or not torch.allclose(a, b, rtol=1e-9, atol=0.0):
            return None
    return Named("no_grad_output", bad.maker())


def _writes_what_it_differentiates(bad: _WrongCall) -> Named | None:
    """Return the statement of the forward that changes a saved tensor or an argument with a gradient in place."""
    place = _writes(bad.call, lambda needed: needed)
    return Named("inplace", place) if place else None


def _writes(call: RecordedCall, test: Callable[[bool], bool]) -> Place | None:
    """Return the first statement of the forward that changes some arguments in place, or its own saved values.

    Args:
        call: The call.
        test: Chooses arguments by whether they take a gradient; those without one are running statistics.
    """
    forward = source_of(method(call.function, "forward"))
    if any(calls(s, ("mark_dirty",)) for s in forward.statements()):
        return None
    parameters = [a.arg for a in forward.node.args.args]
    chosen = {
        name for name, n in zip(parameters[len(parameters) - len(call.needs) :], call.needs, strict=False) if test(n)
    }
    if test(True):
        saved = forward.simple(lambda s: calls(s, ("save_for_backward",)))
        chosen |= {n.id for s in saved for n in ast.walk(s) if isinstance(n, ast.Name)} - {*parameters}
    found = forward.simple(lambda s: bool(written(s) & chosen))
    return forward.place(found[0]) if found else None


def _kind_of_ratio(call: RecordedCall, wrong: Sequence[WrongArgument], ratio: float) -> str:
    """Return the kind of a mistake that is one factor."""
    if _near(ratio, -1.0):
        return "sign"
    first = wrong[0]
    outputs = tensors_of(call.outputs)
    counts = {count for o in outputs for count in _counts(o.shape, first.value.numel())}
    is_reduced = first.value.ndim <= 1 and any(o.numel() > first.value.numel() for o in outputs)
    if is_reduced and any(_near(ratio, 1 / c) for c in counts if c > 1):
        return "bias_mean"
    for name, value in _scalars(call):
        is_temperature = any(word in name.lower() for word in TEMPERATURES) and value not in (0.0, 1.0)
        if is_temperature and any(_near(ratio, value**power) for power in (1, -1, 2, -2)):
            return "temperature"
    batch = next((float(o.shape[0]) for o in outputs if o.ndim), 0.0)
    if batch > 2 and (_near(ratio, batch) or _near(ratio, 1 / batch)):
        return "batch"
    return "factor"


def _counts(shape: Sequence[int], kept: int) -> set[float]:
    """Return the possible element counts of a mean over axes of an output."""
    axes = list(shape)
    if kept in axes:
        axes.reverse()
        axes.remove(kept)  # the last one
    return {float(math.prod(some)) for n in range(1, len(axes) + 1) for some in combinations(axes, n)}


def _scalars(call: RecordedCall) -> list[tuple[str, float]]:
    """Return the numbers that a call got, with the names of their parameters."""
    names = list(inspect.signature(method(call.function, "forward")).parameters)
    names = names[len(names) - len(call.args) :] if len(names) >= len(call.args) else [""] * len(call.args)
    found = []
    for name, value in zip(names, call.args, strict=False):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
            found.append((name, float(value)))
    return found


def _is_transposed(wrong: WrongArgument) -> bool:
    value = wrong.value
    if not wrong.is_complete or value.ndim < 2 or value.shape[-1] != value.shape[-2]:
        return False
    right = wrong.numeric_E.view(value.shape).mT.reshape(-1)
    return bool(torch.allclose(wrong.analytic_E, right, rtol=1e-4, atol=1e-7 * float(right.abs().max())))


def _by_pattern(bad: _WrongCall, made: Place) -> Named:
    """Return the kind that explains which elements are wrong."""
    first, call = bad.wrong[0], bad.call
    if _only_negative(first):
        return Named("negative", bad.only(made, _about("where", "clamp", "abs", "sign", "relu", "mask", "neg")))
    if (group := _only_group(first)) is not None:
        return Named(group, bad.only(made, _assigns_part))
    if _lacks_inner_product(call, first):
        return Named("inner_product", made)
    if _has_epsilon(bad) and _right_when_large(bad):
        return Named("eps", bad.only(made, _about("eps")))
    if _right_for_one(bad):
        return Named("batch", made)
    sizes = [o.numel() for o in tensors_of(call.outputs)]
    if all(w.value.numel() < max(sizes, default=0) for w in bad.wrong) and len(bad.wrong) < sum(call.needs):
        return Named("broadcast", made)
    return Named("missing_term", made)


def _only_negative(wrong: WrongArgument) -> bool:
    """Return whether the gradient is wrong where the input is negative, and right elsewhere."""
    if wrong.value.is_complex():
        return False
    x_E, bad_E = wrong.value.reshape(-1)[wrong.elements_E], ~wrong.right_E
    below = x_E < 0
    if not below.any() or below.all() or bool((bad_E & ~below).any()):
        return False
    return int((bad_E & below).sum()) >= MIN_WRONG_FRAC * int(below.sum())


def _only_group(wrong: WrongArgument) -> str | None:
    """Return `channel` if one index of a dimension is wrong, `batch` if all rows but the first are, else None."""
    bad_E, shape = ~wrong.right_E, wrong.value.shape
    at = torch.unravel_index(wrong.elements_E, shape) if len(shape) else ()
    for dimension in sorted(range(len(shape)), key=lambda d: d == 0):
        index_E, size = at[dimension], shape[dimension]
        hit = set(index_E[bad_E].tolist())
        if size < 2 or not hit:
            continue
        share = int(bad_E.sum()) / int(sum((index_E == i).sum() for i in hit))
        if share < MIN_WRONG_FRAC:
            continue
        if dimension == 0 and len(shape) > 1 and size > 2 and len(hit) == size - 1:
            return "batch"
        if len(hit) == 1:
            return "channel"
    return None


def _lacks_inner_product(call: RecordedCall, wrong: WrongArgument) -> bool:
    """Return whether the error is a row's number times the output, or its exponential: softmax without its sum."""
    outputs = tensors_of(call.outputs)
    if not wrong.is_complete or not outputs or outputs[0].shape != wrong.value.shape or not wrong.value.ndim:
        return False
    error = (wrong.analytic_E - wrong.numeric_E).view(wrong.value.shape)
    for weights in (outputs[0], outputs[0].exp()):
        for dimension in range(weights.ndim):
            if not torch.allclose(weights.sum(dimension), torch.ones((), dtype=weights.dtype)):
                continue  # not a distribution
            quotient = error / weights
            spread = (quotient - quotient.mean(dimension, keepdim=True)).abs().max()
            if float(spread) <= RATIO_TOLERANCE * float(quotient.abs().max()) and weights.shape[dimension] > 2:
                return True
    return False


def _has_epsilon(bad: _WrongCall) -> bool:
    """Return whether a Function names an epsilon, or adds a small number."""
    for name in ("forward", "setup_context", "backward"):
        nodes = list(ast.walk(bad.source(name).node))
        factors = [
            x for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for x in (n.left, n.right)
        ]
        for node in nodes:
            is_number = isinstance(node, ast.Constant) and isinstance(node.value, float) and node not in factors
            if is_number and 0 < node.value <= MAX_EPSILON:  # type: ignore[attr-defined]  # a float constant
                return True
            if isinstance(node, (ast.Name, ast.Attribute)) and mentions(node, ("eps",)):
                return True
    return any("eps" in name.lower() for name, _ in _scalars(bad.call))


def _right_for_one(bad: _WrongCall) -> bool:
    """Return whether the gradient is right for the first sample alone."""
    call = bad.call
    batch = next((o.shape[0] for o in tensors_of(call.outputs) if o.ndim), 0)

    def first(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch
        return value[:1].clone() if is_batched else value

    args = tuple(map(first, copied(call.args)))
    one = RecordedCall(call.function, call.index, args, args, call.needs, random=call.random)
    one.grad_outputs = tuple(map(first, call.grad_outputs or ()))
    try:
        return batch > 1 and bad.is_right(again(one), one)
    except RuntimeError:  # a Function for this batch size only
        return False


def _right_when_large(bad: _WrongCall) -> bool:
    """Return whether the error shrinks as the inputs grow, like the error of a misplaced epsilon."""
    call, errors = bad.call, []
    for factor in (1.0, LARGE):
        args = list(copied(call.args))
        biggest = max((a for a in tensors_of(args)), key=lambda a: a.numel())
        biggest.mul_(factor)
        larger = RecordedCall(call.function, call.index, tuple(args), tuple(args), call.needs, random=call.random)
        larger.grad_outputs = call.grad_outputs
        grads = again(larger)
        errors.append(max(bad.nodes.distance(larger, w.index, grads[w.index]) for w in bad.wrong))
    return errors[0] > 0 and errors[1] < errors[0] / MIN_DECREASE


def _assigns_part(statement: ast.stmt) -> bool:
    """Return whether a statement assigns to a part of a tensor."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    is_part = any(isinstance(t, ast.Subscript) for t in targets)
    return is_part or calls(statement, ("index_fill_", "index_copy_", "index_add_", "masked_fill_", "narrow", "select"))


def _about(*words: str) -> Callable[[ast.stmt], bool]:
    """Return a test for statements that mention or call one of these words."""
    return lambda s: mentions(s, words) or calls(s, words)


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= RATIO_TOLERANCE * abs(other)
