"""What a node of the tape says of the loss: that it is given probabilities, scores, or one value only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from gradwatch.probe.graph.graph import Graph, Node, operation, shape
from gradwatch.probe.graph.singularities import FRACTIONS, is_log_of_fraction

LINEAR = frozenset({"Addmm", "Mm", "Linear", "Convolution"})

CLAMPS = frozenset({"Add", "Clamp", "ClampMin", "ClampMax"})
"""Operations with a constant after which a probability is one still, as people write them before a logarithm."""


class Fact(NamedTuple):
    """An event to be: its kind, text and values, and the node that it is about."""

    kind: str
    node: Node
    text: str
    values: dict[str, float]


Rule = Callable[[Graph, Node], Fact | None]


def is_probability(graph: Graph, node: Node | None, *, depth: int = 6) -> bool:
    """Say whether a value is a softmax or sigmoid, moved about, clamped, averaged or with a constant added."""
    node = graph.through(node, also=CLAMPS)
    if node is None or not depth:
        return False
    name, inputs = operation(node), graph.inputs(node)
    if name in FRACTIONS or _is_logistic(graph, node):
        return True
    if name in ("Stack", "Cat", "Add", "Mean"):  # of an ensemble
        return bool(inputs) and all(is_probability(graph, child, depth=depth - 1) for child in inputs)
    if name in ("Mul", "Bmm", "Mm"):  # of a mixture: what a gate gives, times what its experts say
        return len(inputs) == 2 and all(is_probability(graph, child, depth=depth - 1) for child in inputs)
    if name == "Sum":
        return _is_mixture(graph, graph.through(graph.first(node)), depth=depth)
    if name in ("Div", "Mul") and len(inputs) == 1 and operation(inputs[0]) == "Add":
        is_moved = name == "Div" and is_probability(graph, inputs[0], depth=depth - 1)
        return is_moved or _is_shifted_tanh(graph, inputs[0])
    if name == "Div":  # by its own sum: a softmax by hand
        total = graph.through(inputs[1])
        return total is not None and operation(total) == "Sum" and graph.first(total) is inputs[0]
    return False


def _is_logistic(graph: Graph, node: Node) -> bool:
    """Say whether a value is a sigmoid by hand: 1 / (1 + exp(-x)), or exp(x) / (1 + exp(x))."""
    inputs = graph.inputs(node)
    if operation(node) == "Mul" and len(inputs) == 1:
        node, inputs = inputs[0], graph.inputs(inputs[0])
    is_fraction = operation(node) == "Div" and len(inputs) == 2 and operation(inputs[0]) == "Exp"
    if not (operation(node) == "Reciprocal" or is_fraction) or operation(inputs[-1]) != "Add":
        return False
    terms = graph.inputs(inputs[-1])
    return len(terms) == 1 and operation(terms[0]) == "Exp"


def _is_difference(graph: Graph, node: Node | None) -> bool:
    """Say whether a value is one probability less another, as a ranking has them that is to compare scores."""
    made_by = graph.through(node)
    if made_by is None or operation(made_by) != "Sub" or len(graph.inputs(made_by)) != 2:
        return False
    return all(is_probability(graph, child) for child in graph.inputs(made_by))


def _is_shifted_tanh(graph: Graph, node: Node) -> bool:
    """Say whether something was added to a tanh, as (tanh + 1) / 2 has it: a sigmoid of twice the scores."""
    made_by = graph.through(node, also=CLAMPS)
    return made_by is not None and operation(made_by) == "Tanh"


def _is_mixture(graph: Graph, node: Node | None, *, depth: int) -> bool:
    """Say whether terms that are summed up are probabilities, weighed by a softmax."""
    if node is None or operation(node) != "Mul":
        return False
    factors = [graph.through(child) for child in graph.inputs(node)]
    is_weighed = any(factor is not None and operation(factor) == "Softmax" for factor in factors)
    return is_weighed and is_probability(graph, node, depth=depth - 1)


def _log_softmax(graph: Graph, node: Node) -> Fact | None:
    if not is_probability(graph, graph.first(node)):
        return _constant(graph, node)
    classes = _classes(graph, node)
    text = f"the loss applies a softmax to what is a probability already: it cannot fall below {_floor(classes):.2f}"
    return Fact("tape-probabilities", node, text, {"classes": float(classes), "floor": _floor(classes)})


def _logsumexp(graph: Graph, node: Node) -> Fact | None:
    return _log_softmax(graph, node) if is_probability(graph, graph.first(node)) else None


def _logits(graph: Graph, node: Node) -> Fact | None:
    if not (is_probability(graph, graph.first(node)) or _is_difference(graph, graph.first(node))):
        return None
    floor = math.log1p(math.exp(-1))  # of a positive sample; log 2 for a negative one
    text = f"the loss applies a sigmoid to what is a probability already: it cannot fall below {floor:.2f}"
    return Fact("tape-probabilities", node, text, {"classes": 2.0, "floor": floor})


def _nll(graph: Graph, node: Node) -> Fact | None:
    if is_probability(graph, graph.first(node)):
        return Fact("tape-probabilities", node, "the loss expects log-probabilities and gets probabilities", {})
    made_by = graph.through(graph.first(node))
    if made_by is not None and operation(made_by) in LINEAR:
        return Fact("tape-scores", node, "the loss expects log-probabilities and gets raw scores", {})
    if made_by is not None and _goes_over_samples(made_by):
        text = f"the softmax goes over the {shape(made_by)[0]} samples of the batch, not over the classes"
        return Fact("tape-over-batch", made_by, text, {"samples": float(shape(made_by)[0])})
    return None


def _goes_over_samples(node: Node) -> bool:
    """Say whether a log-softmax of shape (samples, classes, ...) sums up over the samples."""
    is_batch = operation(node) == "LogSoftmax" and len(shape(node)) > 1 and shape(node)[0] > 1
    return is_batch and getattr(node, "_saved_dim", -1) == 0


def divergence(graph: Graph, node: Node) -> Fact | None:
    """Look for a KL divergence, a constant minus targets times inputs, whose inputs are no log-probabilities."""
    edges = graph.edges(node)
    if (
        operation(node) != "Sub"
        or len(edges) != 2
        or edges[0] is not None
        or edges[1] is None
        or operation(edges[1]) != "Mul"
    ):
        return None
    inputs = graph.inputs(edges[1])
    if len(inputs) != 1 or not is_probability(graph, inputs[0]) or shape(node) != shape(inputs[0]):
        return None
    return Fact("tape-probabilities", node, "the divergence expects log-probabilities and gets probabilities", {})


def _constant(graph: Graph, node: Node) -> Fact | None:
    if _classes(graph, node) > 1:
        return None
    return Fact("tape-constant", node, "a softmax over a single value is 1, whatever the value", {})


def _squeezed(graph: Graph, node: Node) -> Fact | None:
    """Look for a sigmoid or softmax of what is one already, as a loss by hand has it that applies its own."""
    made_by = graph.through(graph.first(node), also=CLAMPS)
    name = operation(node)
    is_fraction = made_by is not None and operation(made_by) in FRACTIONS
    is_fraction |= name == "Sigmoid" and _is_difference(graph, graph.first(node))
    if not is_fraction or not _makes_a_loss(graph, node):
        return _constant(graph, node) if name == "Softmax" else None
    text = f"a {name.lower()} is applied to what is a probability already: it can hardly tell 0 from 1"
    return Fact("tape-probabilities", node, text, {})


def _makes_a_loss(graph: Graph, node: Node) -> bool:
    """Say whether a term of the loss is made of a value alone: what others are multiplied by is a weight, or a gate."""
    above = graph.above(node)
    return all(child in above or child is node for it in above if operation(it) != "Add" for child in graph.inputs(it))


def _log(graph: Graph, node: Node) -> Fact | None:
    if not is_log_of_fraction(graph, node):
        return None
    return Fact("tape-log-of-softmax", node, "the log of a softmax or sigmoid rounds to log(0)", {})


RULES: dict[str, Rule] = {
    "LogSoftmax": _log_softmax,
    "Logsumexp": _logsumexp,
    "BinaryCrossEntropyWithLogits": _logits,
    "LogSigmoid": _logits,
    "CtcLoss": _nll,
    "CudnnCtcLoss": _nll,
    "NllLoss": _nll,
    "NllLoss2D": _nll,
    "Sigmoid": _squeezed,
    "Softmax": _squeezed,
    "Log": _log,
}


def _floor(classes: int) -> float:
    """Return the cross entropy of a softmax over probabilities that are all on the right class: log(e + C - 1) - 1."""
    return math.log(math.e + classes - 1) - 1


def _classes(graph: Graph, node: Node) -> int:
    """Return the length of the dimension that a softmax goes over."""
    before = graph.first(node)
    sizes = shape(node if before is None else before)
    dim = getattr(node, "_saved_dim", -1)
    dim = dim[0] if isinstance(dim, tuple) else dim  # of a logsumexp
    return sizes[dim if dim < len(sizes) else dim - (1 << 64)] if sizes else 1
