"""Trace the axis of a softmax back to the layer of the scores, and check that it runs over the layer's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from gradwatch.events import MIXED_AXES
from gradwatch.probe.graph.graph import LINEAR, TRANSPOSING, Graph, Node, dimension, is_leaf, operation, shape
from gradwatch.probe.graph.loss_rules import GraphMatch

VIEWS = frozenset({"Flatten", "Reshape", "ReshapeAlias", "Squeeze", "Unflatten", "UnsafeView", "Unsqueeze", "View"})
"""Operations that change the shape and keep the order of the values."""

ELEMENTWISE = frozenset({"Alias", "Clone", "Contiguous", "Copy", "ToCopy", "Add", "Div", "Mul", "Neg", "Sub"})
"""Operations that keep each value in place if they have one input that is not a constant."""

CHANNEL_DIM = 1
"""Dimension of the outputs of a convolution."""

LOSSES = ("NllLoss", "NllLoss2D")


class AxisSpan(NamedTuple):
    """Stride of an axis in a contiguous tensor, and its stride times its length."""

    inner: int
    outer: int


def match_axis_mixup(graph: Graph, node: Node) -> GraphMatch | None:
    """Match a cross entropy with a softmax that does not normalize over the outputs of the scores' layer.

    `view(batch, classes, time)` of scores (batch, time, classes) has the shape that a cross entropy needs, but
    `transpose(1, 2)` was meant: the view spreads the scores of one position over several.

    Args:
        graph: Autograd graph of a loss.
        node: One of `LOSSES`.
    """
    made_by = graph.through(graph.first(node))
    if made_by is None or operation(made_by) != "LogSoftmax" or len(shape(made_by)) < 2:
        return None
    sizes = shape(made_by)
    axis = dimension(made_by._saved_dim, len(sizes))
    where = _mixing(graph, made_by, axis) if sizes[axis] > 1 else None
    if where is None:
        return None
    layer, outputs = where
    return GraphMatch(layer, MIXED_AXES.observe(values={"classes": sizes[axis]}, outputs=outputs))


def _mixing(graph: Graph, softmax: Node, axis: int) -> tuple[Node, int] | None:
    """Return the layer whose outputs are mixed up before a softmax, and the number of outputs; or None."""
    classes = shape(softmax)[axis]
    is_torn = is_joined = False
    node = graph.first(softmax)
    while node is not None and operation(node) not in LINEAR:
        if (product := graph.past_bias(node)) is not node:  # of the same shape
            node = product
            continue
        inputs, name = graph.inputs(node), operation(node)
        if len(inputs) != 1:  # a sum of two branches: the scores have no single layer
            return None
        before, after = shape(inputs[0]), shape(node)
        if name in VIEWS and not is_torn:
            found = _before_view(before, after, axis)
            # several axes, such as all places of a picture, may be what is chosen from
            is_joined, is_torn = found is None, found is None or found < 0
            axis = axis if found is None or is_torn else found
        elif name in TRANSPOSING | VIEWS:
            # a torn axis has no position before the view; it stays torn, wherever it goes
            axis = axis if is_torn else _before_transpose(node, axis, len(after))
        elif name not in ELEMENTWISE or before != after:  # a broadcast moves values to new axes
            return None
        node = inputs[0]
    if node is None or not shape(node) or not _has_weight(graph, node):
        return None
    sizes = shape(node)
    class_axis = CHANNEL_DIM if operation(node) == "Convolution" else len(sizes) - 1
    # an axis of another length may be one that the layer does not produce, such as time
    is_other = (is_torn and not is_joined) or ((is_joined or axis != class_axis) and sizes[class_axis] == classes)
    return (node, sizes[class_axis]) if is_other else None


def _has_weight(graph: Graph, node: Node) -> bool:
    # a product of two computed tensors has scores in both directions
    return any(is_leaf(made_by) for child in graph.inputs(node) if (made_by := graph.through(child)) is not None)


TORN = -1
"""Marks an axis that is neither part of one axis of the previous tensor nor a join of several axes."""


def _before_view(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Return the axis before a view that contains an axis; `TORN`; or None if the axis joins several."""
    span = _spans(after)[axis]
    # a view keeps the order of the values, so strides of contiguous tensors show which axes correspond
    for d, (inner, outer) in enumerate(_spans(before)):
        if before[d] > 1 and inner <= span.inner and span.outer <= outer:
            is_part = span.inner % inner == 0 and outer % span.outer == 0
            return d if is_part else TORN
    return None if all(_is_edge(before, edge) for edge in span) else TORN


def _is_edge(sizes: Sequence[int], edge: int) -> bool:
    """Return whether an axis of a tensor ends at a stride, or can be split there."""
    return any(inner <= edge <= outer and edge % inner == 0 and outer % edge == 0 for inner, outer in _spans(sizes))


def _spans(sizes: Sequence[int]) -> list[AxisSpan]:
    inner = list(accumulate(reversed(sizes), mul, initial=1))
    return [AxisSpan(low, high) for low, high in pairwise(inner)][::-1]


def _before_transpose(node: Node, axis: int, dims: int) -> int:
    if operation(node) == "Permute":
        return dimension(node._saved_dims[axis], dims)
    one, other = (
        (0, 1) if operation(node) == "T" else (dimension(d, dims) for d in (node._saved_dim0, node._saved_dim1))
    )
    return other if axis == one else one if axis == other else axis
