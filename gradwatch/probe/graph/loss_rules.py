"""Check single operations of the autograd graph: losses of probabilities, of raw scores, or of one value only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from gradwatch.events import (
    BOUNDED_SCORES,
    CONSTANT_SOFTMAX,
    PROBABILITIES,
    SCORES,
    SOFTMAX_OVER_BATCH,
    Observation,
)
from gradwatch.probe.graph.graph import LINEAR, Graph, Node, dimension, operation, shape
from gradwatch.probe.graph.singularities import FRACTIONS

CLAMPS = frozenset({"Add", "Clamp", "ClampMin", "ClampMax"})
"""Operations with a constant that people apply to a probability before a logarithm."""


class GraphMatch(NamedTuple):
    """A node that matches a rule, and the observation to record; the reader fills in its layer."""

    node: Node
    observation: Observation


Rule = Callable[[Graph, Node], GraphMatch | None]


def is_probability(graph: Graph, node: Node | None, *, depth: int = 6) -> bool:
    """Return whether a value is a softmax or sigmoid, perhaps rearranged, clamped, averaged or shifted.

    Args:
        graph: Autograd graph of a loss.
        node: Operation that computes the value, or None for a constant.
        depth: Maximum number of nested combinations, which bounds the recursion.
    """
    node = graph.through(node, also=CLAMPS)
    if node is None or not depth:
        return False
    name, inputs = operation(node), graph.inputs(node)
    if name in FRACTIONS or _is_logistic(graph, node):
        return True
    if name in ("Stack", "Cat", "Add", "Mean"):  # of an ensemble
        return bool(inputs) and all(is_probability(graph, child, depth=depth - 1) for child in inputs)
    if name in ("Mul", "Bmm", "Mm"):  # of a mixture: weights of a gate times probabilities of its experts
        return len(inputs) == 2 and all(is_probability(graph, child, depth=depth - 1) for child in inputs)
    if name == "Sum":
        return _is_mixture(graph, graph.through(graph.first(node)), depth=depth)
    if name in ("Div", "Mul") and len(inputs) == 1 and operation(inputs[0]) == "Add":
        is_moved = name == "Div" and is_probability(graph, inputs[0], depth=depth - 1)
        return is_moved or _is_shifted_tanh(graph, inputs[0])
    if name == "Div":  # by its own sum: a softmax by hand
        # a constant has no node, so the divisor may be missing, or the numerator
        total = graph.through(inputs[1]) if len(inputs) == 2 else None
        return total is not None and operation(total) == "Sum" and graph.first(total) is inputs[0]
    return False


def _is_logistic(graph: Graph, node: Node) -> bool:
    """Return whether a value is a handwritten sigmoid: 1 / (1 + exp(-x)), or exp(x) / (1 + exp(x))."""
    inputs = graph.inputs(node)
    # 1 / x is a Reciprocal, which autograd multiplies by the constant 1
    if operation(node) == "Mul" and len(inputs) == 1:
        node, inputs = inputs[0], graph.inputs(inputs[0])
    is_fraction = operation(node) == "Div" and len(inputs) == 2 and operation(inputs[0]) == "Exp"
    if not ((operation(node) == "Reciprocal" and inputs) or is_fraction) or operation(inputs[-1]) != "Add":
        return False
    terms = graph.inputs(inputs[-1])
    return len(terms) == 1 and operation(terms[0]) == "Exp"


def _is_difference(graph: Graph, node: Node | None) -> bool:
    # a ranking loss should compare scores instead
    made_by = graph.through(node)
    if made_by is None or operation(made_by) != "Sub" or len(graph.inputs(made_by)) != 2:
        return False
    return all(is_probability(graph, child) for child in graph.inputs(made_by))


def _is_shifted_tanh(graph: Graph, node: Node) -> bool:
    # (tanh + 1) / 2 is a sigmoid of twice the scores
    made_by = graph.through(node, also=CLAMPS)
    return made_by is not None and operation(made_by) == "Tanh"


def _is_mixture(graph: Graph, node: Node | None, *, depth: int) -> bool:
    if node is None or operation(node) != "Mul":
        return False
    factors = [graph.through(child) for child in graph.inputs(node)]
    is_weighed = any(factor is not None and operation(factor) == "Softmax" for factor in factors)
    return is_weighed and is_probability(graph, node, depth=depth - 1)


def _log_softmax(graph: Graph, node: Node) -> GraphMatch | None:
    return _normalized(graph, node) or _constant(graph, node)


def _normalized(graph: Graph, node: Node) -> GraphMatch | None:
    """Match scores that a softmax normalizes although they are probabilities, or have a bound."""
    classes = _classes(graph, node)
    if is_probability(graph, graph.first(node)):
        return _reapplied(node, "softmax", classes=classes, floor=_floor(classes))
    return _bounded(graph, node, classes=classes, unreached=classes - 1)


def _bounded(graph: Graph, node: Node, *, classes: int, unreached: int) -> GraphMatch | None:
    """Match scores that come straight from a ReLU or a tanh.

    Args:
        graph: Autograd graph of a loss.
        node: Operation of the loss that takes the scores.
        classes: Number of classes, 2 for a sigmoid.
        unreached: Number of other scores that count against the right one.
    """
    made_by = graph.through(graph.first(node))
    if classes < 2 or made_by is None or operation(made_by) not in ("Relu", "Tanh"):
        return None
    if operation(made_by) == "Relu":
        effect = "a score of 0 gets no gradient" if unreached else "no probability is below 0.5"
        return GraphMatch(node, BOUNDED_SCORES.observe(values={"classes": classes}, bound="ReLU", effect=effect))
    # the right score is at most 1, and the others are at least -1; a sigmoid compares the score with 0
    floor = math.log1p(unreached * math.exp(-2)) if unreached else math.log1p(math.exp(-1))
    values = {"classes": classes, "floor": floor}
    return GraphMatch(
        node, BOUNDED_SCORES.observe(values=values, bound="tanh", effect=f"it cannot fall below {floor:.2f}")
    )


def _logits(graph: Graph, node: Node) -> GraphMatch | None:
    if not (is_probability(graph, graph.first(node)) or _is_difference(graph, graph.first(node))):
        return _bounded(graph, node, classes=2, unreached=0)
    floor = math.log1p(math.exp(-1))  # of a positive sample; log 2 for a negative one
    return _reapplied(node, "sigmoid", classes=2, floor=floor)


def _reapplied(node: Node, function: str, *, classes: int, floor: float) -> GraphMatch:
    misuse, effect = f"the loss applies a {function} to probabilities", f"it cannot fall below {floor:.2f}"
    values = {"classes": classes, "floor": floor}
    return GraphMatch(node, PROBABILITIES.observe(values=values, misuse=misuse, effect=effect))


def _nll(graph: Graph, node: Node) -> GraphMatch | None:
    if is_probability(graph, graph.first(node)):
        return _not_logarithmic(node, "loss")
    made_by = graph.through(graph.first(node))
    if _is_linear(graph, made_by):
        return GraphMatch(node, SCORES.observe())
    softmax = _softmax_of(graph, made_by)
    # a cross entropy normalizes what another softmax may have normalized before
    for each in (softmax, softmax and _softmax_of(graph, graph.through(graph.first(softmax)))):
        if each is not None and _goes_over_samples(each):
            return GraphMatch(each, SOFTMAX_OVER_BATCH.observe(values={"samples": shape(each)[0]}))
    return None


def _is_linear(graph: Graph, node: Node | None) -> bool:
    product = graph.through(graph.past_bias(node))
    return product is not None and operation(product) in LINEAR


def _not_logarithmic(node: Node, function: str) -> GraphMatch:
    misuse = f"the {function} expects log-probabilities"
    return GraphMatch(node, PROBABILITIES.observe(misuse=misuse, effect="it gets probabilities"))


def _softmax_of(graph: Graph, node: Node | None) -> Node | None:
    """Return the softmax whose logarithm a node computes, or None."""
    if node is not None and operation(node) == "Log":
        below = graph.through(graph.first(node), also=CLAMPS)
        return below if below is not None and operation(below) == "Softmax" else None
    return node if node is not None and operation(node) == "LogSoftmax" else None


def _goes_over_samples(softmax: Node) -> bool:
    # the first dimension is that of the samples: the shape is (samples, classes, ...)
    sizes = shape(softmax)
    return len(sizes) > 1 and sizes[0] > 1 and dimension(softmax._saved_dim, len(sizes)) == 0


def match_divergence(graph: Graph, node: Node) -> GraphMatch | None:
    """Match a KL divergence of probabilities or of raw scores: a constant minus targets times inputs."""
    edges = graph.edges(node)
    # targets are constants, so the first edge is None and the product has a single input
    if (
        operation(node) != "Sub"
        or len(edges) != 2
        or edges[0] is not None
        or edges[1] is None
        or operation(edges[1]) != "Mul"
    ):
        return None
    inputs = graph.inputs(edges[1])
    if len(inputs) != 1 or shape(node) != shape(inputs[0]):
        return None
    if is_probability(graph, inputs[0]):
        return _not_logarithmic(node, "divergence")
    is_of_scores = shape(node)[-1:] > (1,) and _is_linear(graph, graph.through(inputs[0]))
    return GraphMatch(node, SCORES.observe()) if is_of_scores else None


def _constant(graph: Graph, node: Node) -> GraphMatch | None:
    if _classes(graph, node) > 1:
        return None
    return GraphMatch(node, CONSTANT_SOFTMAX.observe())


def _squeezed(graph: Graph, node: Node) -> GraphMatch | None:
    """Match a sigmoid or softmax of a sigmoid or softmax, as in a handwritten loss that applies its own."""
    made_by = graph.through(graph.first(node), also=CLAMPS)
    name = operation(node)
    is_fraction = made_by is not None and operation(made_by) in FRACTIONS
    is_fraction |= name == "Sigmoid" and _is_difference(graph, graph.first(node))
    if not is_fraction or not _makes_a_loss(graph, node):
        # a softmax over one value is wrong wherever it is
        return _constant(graph, node) if name == "Softmax" else None
    misuse = f"a {name.lower()} is applied to probabilities"
    return GraphMatch(node, PROBABILITIES.observe(misuse=misuse, effect="it can hardly distinguish 0 from 1"))


def _makes_a_loss(graph: Graph, node: Node) -> bool:
    # a value that is combined with others, except by addition, is a weight or a gate
    above = graph.above(node)
    return all(child in above or child is node for it in above if operation(it) != "Add" for child in graph.inputs(it))


RULES: dict[str, Rule] = {
    "LogSoftmax": _log_softmax,
    "Logsumexp": _normalized,
    "BinaryCrossEntropyWithLogits": _logits,
    "LogSigmoid": _logits,
    "CtcLoss": _nll,
    "CudnnCtcLoss": _nll,
    "NllLoss": _nll,
    "NllLoss2D": _nll,
    "Sigmoid": _squeezed,
    "Softmax": _squeezed,
}


def _floor(classes: int) -> float:
    """Return the cross entropy of a softmax of perfect one-hot probabilities: log(e + C - 1) - 1."""
    return math.log(math.e + classes - 1) - 1


def _classes(graph: Graph, node: Node) -> int:
    """Return the length of the dimension that a softmax normalizes over."""
    before = graph.first(node)
    sizes = shape(node if before is None else before)
    dim = getattr(node, "_saved_dim", -1)
    dim = dim[0] if isinstance(dim, tuple) else dim  # of a logsumexp
    return sizes[dimension(dim, len(sizes))] if sizes else 1
