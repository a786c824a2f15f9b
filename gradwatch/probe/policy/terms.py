"""Find a policy gradient in the graph of a loss: chosen actions, weighed by a constant for each, or clipped ratios."""

from __future__ import annotations

from typing import NamedTuple

from gradwatch.probe.graph.entropy import MAX_NESTED, logits_of
from gradwatch.probe.graph.graph import Graph, Node, operation, shape
from gradwatch.probe.graph.loss_rules import CLAMPS

CHOICES = ("Gather", "Index", "NllLoss")
"""Operations that take the probability of one action of each sample, or its logarithm."""

KEEPS_ALL = ("Log", "LogSoftmax", "Softmax")
"""Operations whose node keeps the probabilities of all actions, or their logarithms."""


class Policy(NamedTuple):
    """A policy gradient.

    Args:
        source: Operation whose node keeps the probabilities of all actions, or what they follow from; None if actions
            are continuous.
        weighings: Products with a constant for each chosen action, such as its advantage; the nearest first.
        ratio: Probability divided by the probability at the time of the choice: the exponential of a difference; or
            None.
        clamp: Clamp of the ratio, or None.
    """

    source: Node | None
    weighings: tuple[Node, ...]
    ratio: Node | None
    clamp: Node | None

    @property
    def node(self) -> Node:
        """A node above the parameters of the policy."""
        return self.ratio if self.source is None else self.source


def find_policy(graph: Graph) -> Policy | None:
    """Return the policy gradient in the graph of a loss, or None.

    Weights of classes in a cross entropy look the same; only the signs of the constants differ.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for choice in graph.of(*CHOICES):
        below = graph.first(choice)
        source = _source(graph, below) if logits_of(graph, below) is not None else None
        if source is None:
            continue
        above = sorted(graph.above(choice), key=lambda node: -order[node])
        # a factor of the whole loss has no shape
        weighings = tuple(it for it in above if operation(it) == "Mul" and None in graph.edges(it) and shape(it))
        if weighings:
            ratio = next((it for it in above if _is_ratio(graph, it)), None)
            return Policy(source, weighings, ratio, _clamp_of(graph, ratio))
    for ratio in graph.of("Exp"):
        clamp = _clamp_of(graph, ratio) if _is_ratio(graph, ratio) else None
        bounds = clip_range(clamp)
        if bounds is not None and bounds[0] < 1 < bounds[1]:
            return Policy(None, (), ratio, clamp)
    return None


def clip_range(clamp: Node | None) -> tuple[float, float] | None:
    """Return the bounds of a clamp that are numbers, or None."""
    low, high = (None, None) if clamp is None else (clamp._saved_min, clamp._saved_max)
    return (low, high) if isinstance(low, (float, int)) and isinstance(high, (float, int)) else None


def _source(graph: Graph, node: Node | None) -> Node | None:
    for _ in range(MAX_NESTED):
        node = graph.through(node, also=CLAMPS)
        if node is None or operation(node) in KEEPS_ALL:
            return node
        inputs = graph.inputs(node)
        if operation(node) == "Sub" and len(inputs) == 2 and operation(inputs[1]) == "Logsumexp":
            return inputs[1]
        node = next(iter(inputs), None)
    return None


def _is_ratio(graph: Graph, node: Node) -> bool:
    """Return whether a node is the exponential of a value minus a constant: the reverse is a penalty, not a ratio."""
    difference = graph.through(graph.first(node), also=CLAMPS) if operation(node) == "Exp" else None
    if difference is None or operation(difference) != "Sub":
        return False
    value, constant = graph.edges(difference)
    return value is not None and constant is None


def _clamp_of(graph: Graph, ratio: Node | None) -> Node | None:
    clamps = (it for it in graph.of("Clamp") if ratio is not None and graph.through(graph.first(it)) is ratio)
    return next(clamps, None)
