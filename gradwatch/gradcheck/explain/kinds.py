"""Name what is wrong with the backward of a custom Function, from the pattern of its error and from experiments."""

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
from gradwatch.gradcheck.source import FunctionSource, calls, mentions, source_of, written
from gradwatch.gradcheck.stepping.function_calls import RecordedCall, method, tensors_of
from gradwatch.gradcheck.stepping.tensors import copied
from gradwatch.replay.locate.records import NOWHERE, Place

TEMPERATURES = ("temp", "tau")
MOST = 0.8
"""Share of a group's elements that must be wrong for the group to be what is wrong."""
NEAR = 1e-3
"""Relative distance at which a ratio is taken for a known number."""
LARGE, GONE = 100.0, 5.0
"""Factor of the inputs at which an epsilon no longer counts, and how much smaller the error is then, at least."""
MAX_EPSILON = 0.2


@final
@dataclass(frozen=True, slots=True)
class Named:
    """The kind of a mistake, its place, and its ratio if it is one number."""

    kind: str
    place: Place
    ratio: float = math.nan


def name_mistake(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, modules: Sequence[nn.Module]
) -> Named:
    """Return what is wrong with the backward of a call.

    Args:
        call: The call.
        wrong: Its arguments with a wrong gradient, not empty.
        nodes: Judges gradients of the call.
        modules: Modules of the step, to tell buffers.
    """
    backward = source_of(method(call.function, "backward"))
    right = [i for i, n in enumerate(call.needs) if n and all(w.index != i for w in wrong)]
    made = backward.maker([w.index for w in wrong], right) if backward else NOWHERE
    first = wrong[0]
    missing = [w for w in wrong if not bool((w.analytic_E != 0).any())]
    if missing:
        place = backward.maker([missing[0].index], right) if backward else NOWHERE
        return Named("missing_grad", place, 0.0)
    for experiment in (_in_step_only, _by_layout, _ignores_grad, _writes_what_it_differentiates):
        if (found := experiment(call, wrong, nodes, backward)) is not None:
            return found
    ratio = first.ratio
    if math.isfinite(ratio):
        kind = _kind_of_ratio(call, wrong, ratio)
        if kind != "factor" or len(wrong) == 1:
            fixed = _repaired(call, wrong, nodes)
            if fixed is not None and fixed.kind in (kind, "bias_mean", "sign"):
                return Named(fixed.kind, fixed.place, ratio)
        elif (fixed := _repaired(call, wrong, nodes)) is not None:
            return Named(kind, fixed.place, ratio)
        return Named(kind, made, ratio)
    if _is_transposed(first):
        return Named("transposed", _statement(backward, made, calls_any=("t", "mm", "matmul", "transpose")))
    swap = substitution(call, lambda grads: _agree(call, wrong, nodes, grads), modules)
    if swap is not None:
        kind = "stale" if _writes(call, lambda needed: not needed) else swap.kind
        return Named(kind, swap.place if swap.place.file else made)
    fixed = _repaired(call, wrong, nodes)
    if fixed is not None and fixed.kind != "factor":
        return Named(fixed.kind, fixed.place)
    found = _by_pattern(call, wrong, nodes, backward, fixed.place if fixed else made)
    return Named("factor", found.place) if found.kind == "missing_term" and fixed else found


def detaching_line(function: type[Function]) -> Place:
    """Return the line of a backward that takes a value out of the graph, or no line."""
    source = source_of(method(function, "backward"))
    cuts = (
        source.simple(lambda s: calls(s, ("detach", "item", "numpy", "tolist")) or mentions(s, ("data",)))
        if source
        else []
    )
    return source.place(cuts[0]) if source and cuts else NOWHERE


def backward_line(function: type[Function]) -> Place:
    """Return the line of a backward that returns its gradients, or no line."""
    source = source_of(method(function, "backward"))
    returns = source.returned() if source else []
    return source.place(returns[-1][0]) if source and returns else NOWHERE


def _agree(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, grads: Sequence[Tensor | None]
) -> bool:
    return all(nodes.agrees(call, w.index, grads[w.index]) for w in wrong)


def _repaired(call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck) -> Any:
    return repair(call.function, lambda: _agree(call, wrong, nodes, again(call)))


def _in_step_only(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, backward: FunctionSource | None
) -> Named | None:
    """Return a mistake that an application outside of the step does not make: something changed in between."""
    try:
        if not _agree(call, wrong, nodes, again(call)):
            return None
    except RuntimeError:
        return None
    changed = [
        i
        for i, (now, before) in enumerate(zip(call.given, call.args, strict=True))
        if isinstance(now, Tensor) and not torch.equal(now.detach(), before)
    ]
    kind = "inplace" if changed else "stale"
    place = backward.maker([w.index for w in wrong], ()) if backward else NOWHERE
    return Named(kind, place)


def _by_layout(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, backward: FunctionSource | None
) -> Named | None:
    tensors = [*tensors_of(call.args), *tensors_of(call.grad_outputs)]
    if all(t.is_contiguous() for t in tensors):
        return None
    if not _agree(call, wrong, nodes, again(call, contiguous=True)):
        return None
    forward = source_of(method(call.function, "forward"))
    words = ("view", "as_strided", "storage", "data_ptr", "reshape", "stride", "untyped_storage", "contiguous", "ravel")
    for source in (backward, forward):
        found = source.simple(lambda s: calls(s, words)) if source else []
        if source and found:
            return Named("layout", source.place(found[-1]))
    return Named("layout", backward.maker([w.index for w in wrong], ()) if backward else NOWHERE)


def _ignores_grad(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, backward: FunctionSource | None
) -> Named | None:
    once, twice = again(call), again(call, factor=2.0)
    for w in wrong:
        a, b = once[w.index], twice[w.index]
        if a is None or b is None or not torch.allclose(a, b, rtol=1e-9, atol=0.0):
            return None
    return Named("no_grad_output", backward.maker([w.index for w in wrong], ()) if backward else NOWHERE)


def _writes_what_it_differentiates(
    call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck, backward: FunctionSource | None
) -> Named | None:
    """Return the statement of the forward that changes in place what is saved, or an argument with a gradient."""
    place = _writes(call, lambda needed: needed)
    return Named("inplace", place) if place else None


def _writes(call: RecordedCall, test: Callable[[bool], bool]) -> Place | None:
    """Return the first statement of the forward that changes some arguments in place, or its own saved values.

    Args:
        call: The call.
        test: Chooses arguments by whether they take a gradient; those without one are running statistics.
    """
    forward = source_of(method(call.function, "forward"))
    if forward is None or any(calls(s, ("mark_dirty",)) for s in forward.statements()):
        return None
    parameters = [a.arg for a in forward.node.args.args]
    chosen = {
        name for name, n in zip(parameters[len(parameters) - len(call.needs) :], call.needs, strict=True) if test(n)
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
    """Return how many elements a mean may go over: any of the axes of an output, without the one that is kept."""
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


def _by_pattern(
    call: RecordedCall,
    wrong: Sequence[WrongArgument],
    nodes: NodeCheck,
    backward: FunctionSource | None,
    made: Place,
) -> Named:
    """Return the kind by which elements are wrong."""
    first = wrong[0]
    if _only_negative(first):
        return Named(
            "negative", _statement(backward, made, words=("where", "clamp", "abs", "sign", "relu", "mask", "neg"))
        )
    if (group := _only_group(first)) is not None:
        return Named(group, _statement(backward, made, test=_assigns_part))
    if _lacks_inner_product(call, first):
        return Named("inner_product", made)
    if _has_epsilon(call) and _right_when_large(call, wrong, nodes):
        return Named("eps", _statement(backward, made, words=("eps",)))
    if _right_for_one(call, wrong, nodes):
        return Named("batch", made)
    sizes = [o.numel() for o in tensors_of(call.outputs)]
    if all(w.value.numel() < max(sizes, default=0) for w in wrong) and len(wrong) < sum(call.needs):
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
    return int((bad_E & below).sum()) >= MOST * int(below.sum())


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
        if share < MOST:
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
                continue  # no distribution
            quotient = error / weights
            spread = (quotient - quotient.mean(dimension, keepdim=True)).abs().max()
            if float(spread) <= NEAR * float(quotient.abs().max()) and weights.shape[dimension] > 2:
                return True
    return False


def _has_epsilon(call: RecordedCall) -> bool:
    """Return whether a Function names an epsilon, or adds a small number."""
    for name in ("forward", "setup_context", "backward"):
        source = source_of(method(call.function, name))
        nodes = list(ast.walk(source.node)) if source else []
        factors = [
            x for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for x in (n.left, n.right)
        ]
        for node in nodes:
            is_number = isinstance(node, ast.Constant) and isinstance(node.value, float) and node not in factors
            if is_number and 0 < node.value <= MAX_EPSILON:  # type: ignore[attr-defined]  # a float constant
                return True
            if isinstance(node, (ast.Name, ast.Attribute)) and mentions(node, ("eps",)):
                return True
    return any("eps" in name.lower() for name, _ in _scalars(call))


def _right_for_one(call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck) -> bool:
    """Return whether the gradient is right for the first sample alone."""
    batch = next((o.shape[0] for o in tensors_of(call.outputs) if o.ndim), 0)

    def first(value: Any) -> Any:
        is_batched = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch
        return value[:1].clone() if is_batched else value

    args = tuple(map(first, copied(call.args)))
    one = RecordedCall(call.function, call.index, args, args, call.needs, random=call.random)
    one.grad_outputs = tuple(map(first, call.grad_outputs or ()))
    try:
        return batch > 1 and _agree(one, wrong, nodes, again(one))
    except RuntimeError:  # a Function for this batch size only
        return False


def _right_when_large(call: RecordedCall, wrong: Sequence[WrongArgument], nodes: NodeCheck) -> bool:
    """Return whether the error shrinks if the inputs grow, as that of a misplaced epsilon does."""
    errors = []
    for factor in (1.0, LARGE):
        args = list(copied(call.args))
        biggest = max((a for a in tensors_of(args)), key=lambda a: a.numel())
        biggest.mul_(factor)
        larger = RecordedCall(call.function, call.index, tuple(args), tuple(args), call.needs, random=call.random)
        larger.grad_outputs = call.grad_outputs
        grads = again(larger)
        errors.append(max(nodes.distance(larger, w.index, grads[w.index]) for w in wrong))
    return errors[0] > 0 and errors[1] < errors[0] / GONE


def _assigns_part(statement: ast.stmt) -> bool:
    """Return whether a statement assigns to a part of a tensor."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    is_part = any(isinstance(t, ast.Subscript) for t in targets)
    return is_part or calls(statement, ("index_fill_", "index_copy_", "index_add_", "masked_fill_", "narrow", "select"))


def _statement(
    source: FunctionSource | None,
    otherwise: Place,
    *,
    words: Sequence[str] = (),
    calls_any: Sequence[str] = (),
    test: Callable[[ast.stmt], bool] | None = None,
) -> Place:
    """Return the only statement that has one of the words, calls or forms, else another place."""
    if source is None:
        return otherwise
    found = source.simple(
        lambda s: (
            (bool(words) and (mentions(s, words) or calls(s, words)))
            or (bool(calls_any) and calls(s, calls_any))
            or (test is not None and test(s))
        )
    )
    return source.place(found[0]) if len(found) == 1 else otherwise


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= NEAR * abs(other)
