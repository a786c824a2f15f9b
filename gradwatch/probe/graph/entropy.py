"""Find the entropy of a policy that the loss adds, so that training minimizes it: its usual sign is minus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.events import ENTROPY_MINIMIZED, Observation
from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, operation, shape
from gradwatch.probe.graph.loss_rules import CLAMPS
from gradwatch.records import LayerInfo

KEEP_SIGN = LAYOUT | {"Mean", "Sum", "Add"}
"""Operations through which a term of a loss keeps its sign."""

MAX_NESTED = 6
"""Maximum number of operations between scores and a probability: softmax, sum, division, clamp, logarithm."""


def find_minimized_entropy(
    graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]
) -> Iterator[Observation]:
    """Yield the module that computes the logits of each policy with an entropy that the loss adds.

    A policy has a selected log-probability that a constant for each sample multiplies, its advantage. A product of
    probability and log-probability of the same logits is a negative entropy. Factors without a gradient count as
    positive: their values are gone after the backward pass.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    for node in graph.of("Mul"):
        inputs = graph.inputs(node)
        if len(inputs) != 2 or len(shape(node)) < 2:
            continue
        factors = [graph.through(child, also=CLAMPS) for child in inputs]
        is_log = [_is_log_probability(graph, factor) for factor in factors]
        sources = [logits_of(graph, factor) for factor in factors]
        # one of them is a logarithm, and both come from the same logits
        if is_log[0] == is_log[1] or sources[0] is None or sources[0] is not sources[1]:
            continue
        if _sign_in_loss(graph, node) == -1 and _has_policy_term(graph, sources[0]):
            param = graph.parameter(sources[0])
            if param is not None and param in index:
                yield ENTROPY_MINIMIZED.observe(layers[index[param]].module)


def logits_of(graph: Graph, node: Node | None) -> Node | None:
    """Return the logits of a probability or log-probability; None for other values."""
    source = None
    for _ in range(MAX_NESTED):
        node = graph.through(node, also=CLAMPS)
        if node is None:
            break
        name, inputs = operation(node), graph.inputs(node)
        is_normalized = name in ("Softmax", "LogSoftmax") or _subtracts_logsumexp(graph, node)
        if not (is_normalized or name in ("Log", "Exp") or _divides_by_sum(graph, node)):
            break
        node = inputs[0] if inputs else None
        source = graph.through(node) if is_normalized else source
    return source


def _is_log_probability(graph: Graph, node: Node | None) -> bool:
    return node is not None and (operation(node) in ("LogSoftmax", "Log") or _subtracts_logsumexp(graph, node))


def _subtracts_logsumexp(graph: Graph, node: Node) -> bool:
    inputs = graph.inputs(node)
    return operation(node) == "Sub" and len(inputs) == 2 and operation(inputs[1]) == "Logsumexp"


def _divides_by_sum(graph: Graph, node: Node) -> bool:
    inputs = graph.inputs(node)
    return operation(node) == "Div" and len(inputs) == 2 and graph.first(inputs[1]) is inputs[0]


def _sign_in_loss(graph: Graph, node: Node) -> int | None:
    """Return the sign with which a term reaches the loss, or None if it does so in several ways, or not linearly."""
    signs: dict[Node, int] = {node: 1}
    waiting = [node]
    while waiting:
        child = waiting.pop()
        for user in graph.users(child):
            name, edges = operation(user), graph.edges(user)
            is_scaled = name == "Mul" or (name == "Div" and edges[0] is child)
            if name in KEEP_SIGN or (is_scaled and None in edges):
                sign = signs[child]
            elif name in ("Neg", "Rsub"):
                sign = -signs[child]
            elif name == "Sub":
                sign = signs[child] if edges[0] is child else -signs[child]
            else:
                return None
            if signs.setdefault(user, sign) != sign:
                return None
            waiting.append(user)
    return signs.get(graph.nodes[0])


def _has_policy_term(graph: Graph, logits: Node) -> bool:
    """Return whether log-probabilities of some choices are multiplied by a constant for each of them."""
    for node in graph.of("Gather", "Index", "NllLoss"):
        if logits_of(graph, graph.first(node)) is logits:
            weighed = (it for it in graph.above(node) if operation(it) == "Mul" and None in graph.edges(it))
            if any(shape(it) for it in weighed):  # a factor of the whole loss has no shape
                return True
    return False
