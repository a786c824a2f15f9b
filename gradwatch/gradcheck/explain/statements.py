"""Name a mistake of the step itself: what it does with gradients after autograd, and at which statement."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradwatch.gradcheck.compare import LeafComparison, LeafOutcome
from gradwatch.gradcheck.explain.wording import KIND_TEXT, listed, phrase
from gradwatch.gradcheck.result import Fault
from gradwatch.gradcheck.source import FunctionSource, calls, names_one, source_of
from gradwatch.gradcheck.stepping.reached_state import called_functions
from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.gradcheck.stepping.tensors import inner, random_like, scale_of
from gradwatch.probe.place import NOWHERE, Place

RATIO_TOLERANCE = 1e-3
"""Maximum relative difference of two equal ratios."""
MAX_GROUPS = 16
"""Channels of a dimension to test one by one."""
RATES = ("lr", "rate", "eta")


def step_fault(
    step: CheckedStep, comparison: LeafComparison, wrong: Sequence[str], right: Sequence[str]
) -> list[Fault]:
    """Return the mistakes of a step, one for each way in which leaves are wrong.

    Args:
        step: The step.
        comparison: Compares at the point of the wrong leaves.
        wrong: Names of the wrong leaves.
        right: Names of the right ones.
    """
    patterns = {name: _pattern(step, comparison, name) for name in wrong}
    ratios = {n: ratio for n, (_, ratio) in patterns.items()}
    common = shared_ratio(list(ratios.values()))
    if math.isfinite(common) and (len(wrong) > 1 or not right):
        kind = _kind_of_all(step, comparison, wrong, right, common)
        return [_fault(step, kind, wrong, right, common)]
    if comparison.grads.parts > 1 and all(not math.isfinite(r) or r > 0 for r in ratios.values()):
        kind = "double_count" if _is_tied(step, wrong) else "token_mean"
        if kind == "double_count" or len(wrong) > len(right):
            return [_fault(step, kind, wrong, right, math.nan)]
    groups: dict[str, list[str]] = {}
    for name, (kind, _) in patterns.items():
        groups.setdefault(kind, []).append(name)
    # the most specific pattern first: a mistake in a later layer makes earlier layers wrong without a pattern
    ordered = sorted(groups.items(), key=lambda item: item[0] == "missing_term")
    return [_fault(step, kind, names, right, shared_ratio([ratios[n] for n in names])) for kind, names in ordered[:2]]


def _kind_of_all(
    step: CheckedStep, comparison: LeafComparison, wrong: Sequence[str], right: Sequence[str], ratio: float
) -> str:
    """Return the kind of a mistake that multiplies every wrong leaf by one number."""
    counts = (comparison.grads.backwards, comparison.grads.parts)
    if not ratio:
        return "missing_grad"
    if math.isclose(ratio, -1.0, rel_tol=RATIO_TOLERANCE):
        return "sign"
    if math.isclose(ratio, 2.0, rel_tol=RATIO_TOLERANCE) and (right or _is_tied(step, wrong)):
        return "double_count"
    if any(n > 1 and math.isclose(ratio, n, rel_tol=RATIO_TOLERANCE) for n in counts):
        return "accumulation"
    is_bias = right and all(comparison.grads.by_name[n].ndim == 1 for n in wrong)
    if is_bias and any(math.isclose(ratio, 1 / n, rel_tol=RATIO_TOLERANCE) for n in _batch_sizes(step) if n > 1):
        return "bias_mean"
    if any(math.isclose(ratio, rate, rel_tol=RATIO_TOLERANCE) for rate in _rates(step)):
        return "lr_scale"
    return "factor"


def _rates(step: CheckedStep) -> Iterator[float]:
    """Yield the learning rates in the functions of a step: defaults, and rates of optimizers."""
    for function in called_functions(*step.functions):
        for name, parameter in inspect.signature(function).parameters.items():
            if set(RATES) & set(name.lower().split("_")) and isinstance(parameter.default, (int, float)):
                yield float(parameter.default)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if set(RATES) & set(name.lower().split("_")) and isinstance(value, (int, float)):
                yield float(value)
        for cell in function.__closure__ or ():
            if isinstance(getattr(cell, "cell_contents", None), torch.optim.Optimizer):
                yield from (float(g["lr"]) for g in cell.cell_contents.param_groups)


def _is_tied(step: CheckedStep, wrong: Sequence[str]) -> bool:
    """Return whether every wrong leaf is a parameter with several names."""
    if step.model is None:
        return False
    names = [id(p) for _, p in step.model.named_parameters(remove_duplicate=False)]
    return all(names.count(id(step.leaves[n])) > 1 for n in wrong)


def _pattern(step: CheckedStep, comparison: LeafComparison, name: str) -> tuple[str, float]:
    """Return how one leaf is wrong, and the ratio if it is one number."""
    grad, value = comparison.grads.by_name[name], step.point.leaves[name]
    if not bool((grad != 0).any()):
        return "missing_grad", 0.0
    first, second = comparison.along([name]), comparison.along([name])
    ratio = shared_ratio([_ratio(first), _ratio(second)])
    if math.isfinite(ratio):
        if math.isclose(ratio, -1.0, rel_tol=RATIO_TOLERANCE):
            return "sign", ratio
        inverse = 1 / ratio if ratio else math.nan
        is_mean = grad.ndim == 1 and inverse > 1.5 and math.isclose(inverse, round(inverse), rel_tol=RATIO_TOLERANCE)
        if is_mean and round(inverse) in _batch_sizes(step):
            return "bias_mean", ratio
        return ("double_count" if _is_tied(step, [name]) else "factor"), ratio
    if _is_tied(step, [name]):
        return "double_count", math.nan
    if grad.ndim == 2 and grad.shape[0] == grad.shape[1] and _fits(comparison, name, grad.mT):
        return "transposed", math.nan
    if _is_one_channel(comparison, name, value):
        return "channel", math.nan
    return "missing_term", math.nan


def _ratio(outcome: LeafOutcome) -> float:
    return outcome.analytic / outcome.slope.value if outcome.slope.value else math.nan


def shared_ratio(ratios: Sequence[float]) -> float:
    """Return the common ratio, or nan if the ratios differ."""
    if not ratios or not all(map(math.isfinite, ratios)):
        return math.nan
    return (
        ratios[0]
        if all(math.isclose(r, ratios[0], rel_tol=RATIO_TOLERANCE, abs_tol=1e-12) for r in ratios)
        else math.nan
    )


def _batch_sizes(step: CheckedStep) -> set[int]:
    return {t.shape[0] for t in tree_leaves(step.batch) if isinstance(t, Tensor) and t.ndim}


def _fits(comparison: LeafComparison, name: str, candidate: Tensor) -> bool:
    """Return whether another tensor is the gradient of a leaf, along two directions."""
    value = comparison.step.point.leaves[name]
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        shift = scale_of(value) * random_like(value, generator)
        outcome = comparison.by_shift({name: shift})
        if abs(inner(candidate, shift) - outcome.slope.value) > RATIO_TOLERANCE * outcome.reference:
            return False
    return True


def _is_one_channel(comparison: LeafComparison, name: str, value: Tensor) -> bool:
    """Return whether the gradient is wrong for one index of a dimension only."""
    generator = torch.Generator().manual_seed(7)
    for dimension, size in enumerate(value.shape):
        if not 2 < size <= MAX_GROUPS:
            continue
        wrong = 0
        for i in range(size):
            mask = torch.zeros_like(value)
            mask.select(dimension, i).fill_(scale_of(value))
            outcome = comparison.by_shift({name: mask * random_like(value, generator)})
            wrong += outcome.state == "wrong"
        if wrong == 1:
            return True
    return False


def _fault(step: CheckedStep, kind: str, wrong: Sequence[str], right: Sequence[str], ratio: float) -> Fault:
    """Return the mistake with the statement that most likely makes it."""
    function, place = _statement(step, kind, wrong, right)
    if kind == "factor" and set(RATES) & set(re.split(r"[\W_]+", place.text.lower())):
        kind = "lr_scale"
    where = function or wrong[0]
    at = f" ({place})" if place else ""
    many = {
        "accumulation": "is the sum over micro-batches, and the loss is their mean",
        "token_mean": "is a mean of means, and the loss is the mean over all tokens",
        "lr_scale": "is multiplied by the learning rate",
        "double_count": "counts a shared weight twice",
        "bias_mean": "is averaged over the batch where it is summed",
    }
    text = many.get(kind) or ("" if math.isfinite(ratio) and ratio else KIND_TEXT.get(kind, "is wrong"))
    return Fault(
        kind=kind,
        where=where,
        text=f"the gradient of {listed(wrong)}{f' in {function}' if function else ''}{at} {text}".rstrip()
        + (phrase(ratio) if text else phrase(ratio).replace(": it is", " is").replace(": its sign", ": its sign")),
        tensors=tuple(wrong),
        place=place,
        ratio=ratio,
    )


def _statement(step: CheckedStep, kind: str, wrong: Sequence[str], right: Sequence[str]) -> tuple[str, Place]:
    """Return the function and the statement that writes the gradients of the wrong leaves."""
    sources = list(map(source_of, called_functions(*step.functions)))
    for source in sources:
        writes = source.simple(_writes_grad)
        if not writes:
            continue
        values = dict(_written_values(source, writes, [*wrong, *right]))
        bad = [values[n] for n in wrong if n in values]
        if bad:
            return _name(source), source.common(bad, [values[n][0] for n in right if n in values])
        if kind == "missing_grad":
            break
        others = [s for s in writes if not any(_is_about(s, n) for n in right)]
        return _name(source), source.made_by((others or writes)[-1])
    for source in sources:
        if found := source.simple(lambda s: calls(s, ("backward", "grad"))):
            named = [s for s in found if names_one(s, RATES)] if kind == "lr_scale" else []
            return _name(source), source.place((named or found)[0])
    return (_name(sources[0]), NOWHERE) if sources else ("", NOWHERE)


def _written_values(
    source: FunctionSource, writes: Sequence[ast.stmt], names: Sequence[str]
) -> Iterator[tuple[str, tuple[ast.expr, ast.stmt]]]:
    """Yield the expression that a function makes the gradient of a leaf from, with its statement.

    It is the value of an assignment to the `grad` of that leaf, or the entry of a dict under the name of the leaf.
    """
    for name in names:
        for statement in writes:
            if not _is_about(statement, name):
                continue
            targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
            value: ast.expr | None = getattr(statement, "value", None)
            if isinstance(targets, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(targets.elts, value.elts, strict=False)
                value = next((v for t, v in pairs if _is_about(t, name)), value)
            if value is not None:
                yield name, (value, statement)
        for statement in source.simple(lambda s: isinstance(s, (ast.Assign, ast.AnnAssign))):
            for node in ast.walk(statement):
                if isinstance(node, ast.Dict):
                    keys = [k.value if isinstance(k, ast.Constant) else None for k in node.keys]
                    if name in keys:
                        yield name, (node.values[keys.index(name)], statement)


def _name(source: FunctionSource) -> str:
    return source.node.name if isinstance(source.node, ast.FunctionDef) else ""


def _writes_grad(statement: ast.stmt) -> bool:
    """Return whether a statement sets or changes the `grad` of something, to a value other than None."""
    targets: list[Any] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
        if isinstance(statement.value, ast.Constant):
            return False
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    if any(isinstance(n, ast.Attribute) and n.attr == "grad" for t in targets for n in ast.walk(t)):
        return True
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            inside = any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(node.func.value))
            if inside and name.endswith("_") and name not in ("zero_", "requires_grad_", "detach_"):
                return True
    return False


def _is_about(statement: ast.AST, name: str) -> bool:
    """Return whether a statement names a parameter such as `model.fc1.weight`, or `fc1.weight` with its parts."""
    words = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
    words |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    words |= {str(n.value) for n in ast.walk(statement) if isinstance(n, ast.Constant)}
    return name in words or all(part in words for part in name.split("."))
