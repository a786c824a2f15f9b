"""Find on the tape of a loss what it is for who knows nothing, and the bias whose gradient says how the classes are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, is_leaf, operation, shape
from gradwatch.probe.graph.loss_rules import LINEAR
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


SUM = 2
"""What a node of the tape calls a sum over the samples: `at::Reduction`."""


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the output's bias where the loss is one cross entropy of the scores that it is added to.

    Its gradient is the mean over the batch of predicted probabilities minus labels, times what the loss is scaled by.
    Where the loss is nothing but that cross entropy, its value has a unit: `nat` is what one nat per sample comes to.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    nodes = graph.of("NllLoss")
    made_by = graph.through(graph.first(nodes[0])) if len(nodes) == 1 else None
    if made_by is None or operation(made_by) != "LogSoftmax" or len(shape(made_by)) != 2:
        return
    samples, classes = shape(made_by)
    bias = _bias(graph, graph.through(graph.first(made_by)))
    if bias is not None and bias in index and bias.shape == (classes,):
        text = f"a cross entropy of {samples} samples and {classes} classes"
        values = {"samples": float(samples), "classes": float(classes)}
        if graph.nodes[0] is nodes[0]:
            values["nat"] = float(samples if getattr(nodes[0], "_saved_reduction", None) == SUM else 1)
        yield "tape-classes", layers[index[bias]].name, text, values


def chance(graph: Graph) -> Iterator[Fact]:
    """Yield the loss of a model that knows nothing: log C of each sample, where the loss is one cross entropy.

    Args:
        graph: Tape of a loss.
    """
    root = next((node for node in graph.nodes if operation(node) not in LAYOUT), graph.nodes[0])
    if operation(root) in ("NllLoss", "NllLoss2D"):
        made_by = graph.through(graph.first(root))
        if made_by is None or operation(made_by) != "LogSoftmax" or len(shape(made_by)) < 2:
            return
        sizes, dim = shape(made_by), made_by._saved_dim
        classes = sizes[dim if dim < len(sizes) else dim - (1 << 64)]
    elif operation(root) == "BinaryCrossEntropyWithLogits" and (before := graph.first(root)) is not None:
        sizes, classes = (*shape(before), 2), 2
    else:
        return
    nat = math.prod(sizes) / classes if getattr(root, "_saved_reduction", None) == SUM else 1.0
    if classes > 1:
        text = f"a cross entropy of {classes} classes"
        yield "tape-chance", None, text, {"nat": nat, "classes": float(classes)}


def _bias(graph: Graph, node: Node | None) -> Tensor | None:
    """Return the vector that a linear layer adds to its output."""
    if node is None or operation(node) not in LINEAR:
        return None
    leaves = [child.variable for child in graph.inputs(node) if is_leaf(child)]
    return next((leaf for leaf in leaves if leaf.ndim == 1), None)
