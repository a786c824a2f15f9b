"""Find means over nothing in the autograd graph of a NaN loss: all labels ignored, or no values left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from gradwatch.events import EMPTY_MEAN, IGNORES_LABELS, Observation
from gradwatch.probe.device.sync import can_be_read, to_host
from gradwatch.probe.graph.graph import Graph, Node, operation, shape, signed

COMBINATIONS = frozenset({"Add", "Div", "Mean", "Mul", "Neg", "Sub", "Sum", "ToCopy"})
"""Operations that combine the terms of a loss into one number."""

LIKELIHOODS = ("NllLoss", "NllLoss2D", "NllLossNd")
"""Losses that leave out the labels of an `ignore_index`."""


def find_empty_means(graph: Graph) -> Iterator[Observation]:
    """Yield signs of a mean over nothing in the graph of a loss that is not finite.

    Shapes prove that no value is left. Whether every label is `ignore_index` can only be read if no backward pass has
    freed the labels; otherwise a gradient of exactly zero shows it.

    Args:
        graph: Autograd graph of the loss.
    """
    if any(_is_empty(graph, node) for node in graph.side(COMBINATIONS)):
        yield EMPTY_MEAN.observe(why="no value is left to take the mean of")
        return
    for node in graph.of(*LIKELIHOODS):
        index = signed(node._saved_ignore_index)
        labels = _labels(node)
        if labels is None:
            yield IGNORES_LABELS.observe(values={"ignore_index": index})
        elif (to_host(labels) == index).all():
            yield EMPTY_MEAN.observe(why=f"every label of the batch is ignore_index ({index})")


def _is_empty(graph: Graph, node: Node) -> bool:
    """Return whether a node reduces no values to one number, other than by a sum, which is 0."""
    is_number = not shape(node)
    return is_number and operation(node) != "Sum" and any(_has_none(graph, child) for child in graph.inputs(node))


def _has_none(graph: Graph, node: Node) -> bool:
    # the sum of nothing, divided by their number
    inputs = graph.inputs(node) if operation(node) == "Sum" else ()
    return 0 in shape(node) or any(0 in shape(child) for child in inputs)


def _labels(node: Node) -> Tensor | None:
    """Return the labels of a likelihood; None if they are freed or packed by a hook."""
    # a user's hook may compute the labels again; before torch 2.14, which lacks the attribute, there may be one
    if getattr(node._raw_saved_target, "unpack_hook", node) is not None:
        return None
    with contextlib.suppress(RuntimeError):  # a backward pass frees them
        labels = node._saved_target
        return labels if isinstance(labels, Tensor) and can_be_read(labels) else None
    return None
