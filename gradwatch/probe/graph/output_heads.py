"""Find the heads of a model on the tape of a loss: last layers side by side, behind something that they share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.probe.graph.graph import Graph, Node, is_leaf, operation
from gradwatch.probe.graph.loss_rules import LINEAR
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""

MOST = 8
"""Heads beyond which the loss is more than a sum of tasks, and nobody compares them."""


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the weights of the heads, where there are several and all share a weight before them.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    heads = _heads(graph, index)
    if not 1 < len(heads) <= MOST:
        return
    behind = [{index[p] for p in _weights_below(graph, node, index)} for node in heads.values()]
    if set.intersection(*behind) - set(heads):
        text = f"{len(heads)} heads share what lies before them"
        yield "tape-heads", None, text, {layers[i].name: float(i) for i in sorted(heads)}


def _heads(graph: Graph, index: Mapping[Tensor, int]) -> dict[int, Node]:
    """Return the weights that a walk from the loss meets first, with the operations that multiply by them."""
    heads: dict[int, Node] = {}
    waiting, seen = deque([graph.nodes[0]]), {graph.nodes[0]}
    while waiting and len(heads) <= MOST:
        node = waiting.popleft()
        weight = weight_of(graph, node, index)
        if weight is not None:
            heads.setdefault(weight, node)
            continue
        new = [child for child in graph.inputs(node) if child not in seen]
        seen.update(new)
        waiting += new
    return heads


def weight_of(graph: Graph, node: Node, index: Mapping[Tensor, int]) -> int | None:
    """Return the parameter that an operation multiplies by."""
    if operation(node) not in LINEAR:
        return None
    made_of = [graph.through(child) for child in graph.inputs(node)]
    leaves = [leaf.variable for leaf in made_of if leaf is not None and is_leaf(leaf) and leaf.variable.ndim > 1]
    return next((index[leaf] for leaf in leaves if leaf in index), None)


def _weights_below(graph: Graph, node: Node, index: Mapping[Tensor, int]) -> Iterator[Tensor]:
    for leaf in graph.below(node):
        if is_leaf(leaf) and leaf.variable in index and leaf.variable.ndim > 1:
            yield leaf.variable
