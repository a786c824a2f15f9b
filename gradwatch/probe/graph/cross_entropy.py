"""Find a loss that is a single cross entropy: its value for a uniform guess, and the bias of its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.events import CHANCE, CLASSES, Observation
from gradwatch.probe.graph.graph import LAYOUT, LINEAR, Graph, Node, dimension, is_leaf, operation, shape
from gradwatch.records import LayerInfo

SUM = 2
"""Value of `at::Reduction` that a node saves for a sum over the samples."""


def find_class_bias(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield the bias of the output layer, if the loss is a single cross entropy of that layer's scores.

    The gradient of the bias is the mean over the batch of predicted probabilities minus labels, times the scale of the
    loss. If the loss is the cross entropy alone, the loss has a unit: `nat` is the loss per nat and sample.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    nodes = graph.of("NllLoss")
    softmax = graph.through(graph.first(nodes[0])) if len(nodes) == 1 else None
    if softmax is None or operation(softmax) != "LogSoftmax" or len(shape(softmax)) != 2:
        return
    samples, classes = shape(softmax)
    bias = _bias(graph, graph.through(graph.first(softmax)))
    if bias is not None and bias in index and bias.shape == (classes,):
        values = {"samples": samples, "classes": classes}
        if graph.nodes[0] is nodes[0]:  # a scaled loss, or one with a penalty, has no unit
            values["nat"] = samples if _is_sum(nodes[0]) else 1
        yield CLASSES.observe(layers[index[bias]].name, values=values)


def find_chance_loss(graph: Graph) -> Iterator[Observation]:
    """Yield the loss of a uniform guess, log C per sample, if the loss is a single cross entropy.

    Args:
        graph: Autograd graph of a loss.
    """
    # past layouts and casts of the loss, which do not change its value
    root = next((node for node in graph.nodes if operation(node) not in LAYOUT), graph.nodes[0])
    if operation(root) in ("NllLoss", "NllLoss2D"):
        softmax = graph.through(graph.first(root))
        if softmax is None or operation(softmax) != "LogSoftmax" or len(shape(softmax)) < 2:
            return
        sizes = shape(softmax)
        classes = sizes[dimension(softmax._saved_dim, len(sizes))]
    elif operation(root) == "BinaryCrossEntropyWithLogits" and (scores := graph.first(root)) is not None:
        sizes, classes = (*shape(scores), 2), 2  # each score decides between two classes
    else:
        return
    if classes > 1:
        nats_per_unit = math.prod(sizes) / classes if _is_sum(root) else 1.0
        yield CHANCE.observe(values={"nat": nats_per_unit, "classes": classes})


def _is_sum(loss: Node) -> bool:
    return bool(getattr(loss, "_saved_reduction", None) == SUM)


def _bias(graph: Graph, node: Node | None) -> Tensor | None:
    product = graph.through(graph.past_bias(node))
    if node is None or product is None or operation(product) not in LINEAR:
        return None
    leaves = [child.variable for child in graph.inputs(node) if is_leaf(child)]
    return next((leaf for leaf in leaves if leaf.ndim == 1), None)
