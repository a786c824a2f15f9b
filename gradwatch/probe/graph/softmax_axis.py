"""Follow the axis that a softmax goes over back to the layer that made the scores: are they its outputs still?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from gradwatch.probe.graph.graph import Graph, Node, is_leaf, operation, shape
from gradwatch.probe.graph.loss_rules import LINEAR, Fact

VIEWS = frozenset({"Flatten", "Reshape", "ReshapeAlias", "Squeeze", "Unflatten", "UnsafeView", "Unsqueeze", "View"})
"""Operations that lay the same values out anew, in the same order."""

SAME = frozenset({"Alias", "Clone", "Contiguous", "Copy", "ToCopy", "Add", "Div", "Mul", "Neg", "Sub"})
"""Operations that leave each value at its place, where they have one input that is no constant."""

CHANNELS = 1
"""Axis of the outputs of a convolution."""

LOSSES = ("NllLoss", "NllLoss2D")


class Span(NamedTuple):
    """How far apart the values of an axis lie in a tensor whose values are in one line, and how far all of them go."""

    inner: int
    outer: int


def mixed(graph: Graph) -> Iterator[Fact]:
    """Yield each cross entropy whose softmax goes over other values than the outputs of the layer that made them.

    `view(batch, classes, time)` of scores (batch, time, classes) has the shape that a cross entropy wants, where
    `transpose(1, 2)` was meant: it deals the scores of one place out to several.

    Args:
        graph: Tape of a loss.
    """
    for node in graph.of(*LOSSES):
        made_by = graph.through(graph.first(node))
        if made_by is not None and operation(made_by) == "LogSoftmax" and len(shape(made_by)) > 1:
            sizes = shape(made_by)
            axis = _wrapped(made_by._saved_dim, len(sizes))
            if sizes[axis] > 1 and (where := _mixing(graph, made_by, axis)):
                text = f"the softmax goes over {sizes[axis]} values that are not the {where[1]} outputs of one place"
                yield Fact("tape-mixed", where[0], text, {"classes": float(sizes[axis])})


def _mixing(graph: Graph, softmax: Node, axis: int) -> tuple[Node, int] | None:
    """Return the layer whose outputs are mixed up on the way to a softmax, and how many it has; None where none is."""
    classes = shape(softmax)[axis]
    is_torn = False
    node = graph.first(softmax)
    while node is not None and operation(node) not in LINEAR:
        inputs, name = graph.inputs(node), operation(node)
        if len(inputs) != 1:
            return None
        before, after = shape(inputs[0]), shape(node)
        if name in VIEWS:
            found = _before_view(before, after, axis)
            if found is None:
                return None
            is_torn |= found < 0
            axis = found if found >= 0 else axis
        elif name in ("Transpose", "T", "Permute"):
            axis = axis if is_torn else _before_turn(node, axis, len(after))
        elif name not in SAME or before != after:
            return None
        node = inputs[0]
    if node is None or not shape(node) or not _has_weight(graph, node):
        return None
    sizes = shape(node)
    place = CHANNELS if operation(node) == "Convolution" else len(sizes) - 1
    is_other = is_torn or (axis != place and sizes[place] == classes)
    return (node, sizes[place]) if is_other else None


def _has_weight(graph: Graph, node: Node) -> bool:
    """Say whether a product is that of a layer: one of two computed tensors has scores in both directions."""
    return any(is_leaf(made_by) for child in graph.inputs(node) if (made_by := graph.through(child)) is not None)


TORN = -1
"""Says that an axis is made of parts of others, which no axis of the tensor before was split or joined to."""


def _before_view(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Return the axis that a view has one from, or a part of one; `TORN`; or None for several that join."""
    span = _spans(after)[axis]
    for place, (inner, outer) in enumerate(_spans(before)):
        if before[place] > 1 and inner <= span.inner and span.outer <= outer:
            is_part = span.inner % inner == 0 and outer % span.outer == 0
            return place if is_part else TORN
    return None if all(_is_edge(before, edge) for edge in span) else TORN


def _is_edge(sizes: Sequence[int], edge: int) -> bool:
    """Say whether an axis of a tensor ends there, or can be split there."""
    return any(inner <= edge <= outer and edge % inner == 0 and outer % edge == 0 for inner, outer in _spans(sizes))


def _spans(sizes: Sequence[int]) -> list[Span]:
    inner = list(accumulate(reversed(sizes), mul, initial=1))
    return [Span(low, high) for low, high in pairwise(inner)][::-1]


def _before_turn(node: Node, axis: int, dims: int) -> int:
    """Return where an axis was before a transposition."""
    if operation(node) == "Permute":
        return _wrapped(node._saved_dims[axis], dims)
    one, other = (0, 1) if operation(node) == "T" else (_wrapped(d, dims) for d in (node._saved_dim0, node._saved_dim1))
    return other if axis == one else one if axis == other else axis


def _wrapped(dim: int, dims: int) -> int:
    """Return a dimension counted from the front; the tape keeps a negative one as a number of 64 bits."""
    return int(dim if dim < dims else dim - (1 << 64)) % dims
