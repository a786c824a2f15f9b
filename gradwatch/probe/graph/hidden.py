"""Find on the tape of a loss a softmax that serves as the activation of a hidden layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.probe.graph.graph import Graph, operation
from gradwatch.probe.graph.loss_rules import LINEAR
from gradwatch.probe.graph.output_heads import Fact, weight_of
from gradwatch.records import LayerInfo


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the weight before each softmax whose output a weight multiplies; attention multiplies values instead.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    for node in graph.of(*LINEAR):
        for child in graph.inputs(node):
            made_by = graph.through(child)
            if made_by is None or operation(made_by) != "Softmax" or weight_of(graph, node, index) is None:
                continue
            before = graph.through(graph.first(made_by))
            weight = None if before is None else weight_of(graph, before, index)
            if weight is not None:
                values = {"before": float(weight), "behind": float(weight_of(graph, node, index) or 0)}
                yield (
                    "tape-hidden-softmax",
                    layers[weight].name,
                    "a softmax is the activation of a hidden layer",
                    values,
                )
