"""Formulas on the tape that have a singular point with nothing before them that keeps away from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradwatch.probe.graph.graph import Graph, Node, is_leaf, operation

GUARDS = frozenset({"Clamp", "ClampMin", "Maximum", "Exp", "Softplus", "Cosh", "Threshold", "NanToNum"})
"""Operations whose result a formula may rely on to be positive, or to keep away from 0."""

FRACTIONS = frozenset({"Softmax", "Sigmoid", "Hardsigmoid"})
"""Operations whose result lies between 0 and 1, both of which rounding reaches."""

BOUNDED = FRACTIONS | {"Tanh", "LogSoftmax", "LogSigmoid", "Neg", "Sub", "Clamp", "ClampMax", "Minimum", "Sin", "Cos"}
"""Operations behind which an exponential rarely overflows: bounded ones, and those that take something off."""

WORDS = {
    "Abs": "an absolute value",
    "Div": "a quotient",
    "LinalgVectorNorm": "a norm",
    "Mean": "a mean",
    "Mul": "a product",
    "Norm": "a norm",
    "Pow": "a power",
    "Relu": "a ReLU",
    "Rsub": "a difference",
    "Sigmoid": "a sigmoid",
    "Softmax": "a softmax",
    "Sqrt": "a root",
    "Std": "a standard deviation",
    "Sub": "a difference",
    "Sum": "a sum",
    "Var": "a variance",
}


class Suspect(NamedTuple):
    """A formula that may be at its singular point: how likely it is the culprit (0 first), where, and in words."""

    rank: int
    node: Node
    text: str


def suspects(graph: Graph) -> list[Suspect]:
    """Return the formulas with an open singular point, the most suspicious first, and of equals the nearest."""
    found = [suspect for node in graph.nodes for suspect in _look(graph, node)]
    return sorted(found, key=lambda suspect: suspect.rank)


def is_log_of_fraction(graph: Graph, node: Node) -> bool:
    """Say whether a node is the logarithm of a softmax or sigmoid as it is, which rounds to log(0)."""
    return operation(node) == "Log" and _made_by(graph, graph.first(node)) in FRACTIONS


def is_cancelling_variance(graph: Graph, node: Node) -> bool:
    """Say whether a node is E[x^2] - E[x]^2: rounding makes it negative where the deviation is small."""
    if operation(node) != "Sub" or len(graph.inputs(node)) != 2:
        return False
    mean_square, square_mean = (graph.through(child) for child in graph.inputs(node))
    if mean_square is None or square_mean is None:
        return False
    inner = squared(graph, _averaged(graph, mean_square))
    mean = _averaged(graph, graph.through(squared(graph, square_mean)))
    return inner is not None and mean is not None and _same_source(graph, inner, mean)


def _look(graph: Graph, node: Node) -> Iterator[Suspect]:
    name = operation(node)
    if name in ("Acos", "Asin", "Atanh"):
        yield from _unguarded(graph, node, 0, f"{name.lower()} of %s that nothing clamps: its slope at 1 is infinite")
    elif is_log_of_fraction(graph, node):
        yield from _unguarded(graph, node, 1, "the log of %s, which rounds to 0: log_softmax or logsigmoid does not")
    elif name in ("Log", "Log2", "Log10"):
        yield from _unguarded(graph, node, 2, "the log of %s that may be 0")
    elif is_cancelling_variance(graph, node):
        yield Suspect(2, node, "a variance as E[x^2] - E[x]^2, which rounding makes negative")
    elif name in ("Sqrt", "Rsqrt") or _is_root(node):
        yield from _unguarded(graph, node, 3, "the root of %s that may be 0, where its slope is infinite")
    elif name == "Std":
        yield Suspect(3, node, "a standard deviation, whose slope is infinite where all values are equal")
    elif name in ("Div", "Reciprocal"):
        divisor = graph.edges(node)[-1] if name == "Div" else graph.first(node)
        if divisor is not None and not _is_guarded(graph, divisor):
            yield Suspect(4, node, f"a division by {_words(graph, divisor)} that may be 0")
    elif name == "Exp" and _made_by(graph, graph.first(node)) not in BOUNDED:
        yield Suspect(5, node, "an exponential that nothing bounds")


def _unguarded(graph: Graph, node: Node, rank: int, text: str) -> Iterator[Suspect]:
    argument = graph.first(node)
    if argument is not None and not _is_guarded(graph, argument):
        yield Suspect(rank, node, text % _words(graph, argument))


def _is_guarded(graph: Graph, node: Node) -> bool:
    """Say whether a value was kept from the singular point: clamped, positive by nature, or something added to it."""
    made_by = graph.through(node)
    if made_by is None or operation(made_by) in GUARDS:
        return True
    if operation(made_by) == "Add":  # with a constant only
        return len(graph.inputs(made_by)) == 1
    # a sum of exponentials is no less than each
    return operation(made_by) == "Sum" and _made_by(graph, graph.first(made_by)) in GUARDS


def _is_root(node: Node) -> bool:
    if operation(node) != "Pow":
        return False
    exponent = getattr(node, "_saved_exponent", math.nan)
    return isinstance(exponent, (int, float)) and exponent < 1


def _made_by(graph: Graph, node: Node | None) -> str:
    made_by = graph.through(node)
    return operation(made_by) if made_by is not None else ""


def _words(graph: Graph, node: Node) -> str:
    return WORDS.get(_made_by(graph, node), "a value")


def _averaged(graph: Graph, node: Node | None) -> Node | None:
    """Return what a node is the mean of, or a sum that is divided."""
    node = graph.through(node)
    if node is not None and operation(node) in ("Div", "Mul") and len(graph.inputs(node)) == 1:
        node = graph.through(graph.inputs(node)[0])
    return graph.through(graph.first(node)) if node is not None and operation(node) in ("Mean", "Sum") else None


def squared(graph: Graph, node: Node | None) -> Node | None:
    """Return what a node is the square of."""
    if node is None:
        return None
    if operation(node) == "Pow" and getattr(node, "_saved_exponent", None) == 2:
        return graph.first(node)
    edges = graph.edges(node)
    return edges[0] if operation(node) == "Mul" and len(edges) == 2 and edges[0] is edges[1] else None


def _same_source(graph: Graph, one: Node, other: Node) -> bool:
    one, other = graph.through(one), graph.through(other)
    return one is other and one is not None and not is_leaf(one)
