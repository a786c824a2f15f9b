"""Distinguish products with a weight matrix from other operations of an autograd graph."""

from __future__ import annotations

from gradwatch.probe.graph.graph import LAYOUT, LEAF, Node, operation
from gradwatch.probe.graph.loss_rules import LINEAR

BATCHED = frozenset({"Bmm", "Baddbmm"})
"""Batched matrix products: `einsum` makes one of a product with a weight, attention one of queries and keys."""


def arguments(node: Node) -> list[Node]:
    """Return the nodes of the arguments of an operation; a constant has no node."""
    return [child for child, _ in node.next_functions if child is not None]


def is_product(node: Node) -> bool:
    """Return whether a node multiplies by a matrix; a batched product must have a parameter."""
    name = operation(node)
    if name not in BATCHED:
        return name in LINEAR
    # the factors come last: before them a Baddbmm has the tensor that it adds
    factors = [factor for factor, _ in node.next_functions[-2:] if factor is not None]
    return any(operation(through(factor)) == LEAF for factor in factors)


def through(node: Node) -> Node:
    """Return the operation that computed the values, past operations that only rearrange them."""
    while operation(node) in LAYOUT and len(below := arguments(node)) == 1:
        node = below[0]
    return node
