"""Find how a loss uses the outputs of a model: a regression of chosen outputs, or a comparison of outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.events import CHOSEN_OUTPUTS, OUTPUT_PAIRS, Observation
from gradwatch.probe.graph.graph import LAYOUT, LEAF, Graph, Node, operation, shape
from gradwatch.records import LayerInfo

REGRESSIONS = ("HuberLoss", "MseLoss", "SmoothL1Loss")
"""Losses of a difference between a prediction and a target."""

CHOICE = "Gather"
"""Operation that takes one output of each sample, such as the value of the action that was taken."""


def find_chosen_outputs(graph: Graph) -> Iterator[Observation]:
    """Yield an observation if a regression compares chosen outputs with its targets."""
    if any(_is_chosen(graph, graph.first(loss)) for loss in graph.of(*REGRESSIONS)):
        yield CHOSEN_OUTPUTS.observe()


def find_output_pairs(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield the bias of the last layer, if an operation after that layer joins two values that depend on the bias.

    Distances and similarities of outputs, and outputs that are divided by their norm, barely depend on a bias that all
    of them share. A sum of several terms of a loss has no such values, since each term is one number.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    last = next((la.module for la in reversed(layers) if la.trainable and len(la.shape) > 1), None)
    for leaf in graph.of(LEAF):
        i = index.get(leaf.variable)
        if i is None or layers[i].module != last or len(layers[i].shape) != 1:
            continue
        above = graph.above(leaf)
        if any(shape(node) and _joins(graph, node, above) for node in above):
            yield OUTPUT_PAIRS.observe(layers[i].name)


def _joins(graph: Graph, node: Node, values: set[Node]) -> bool:
    """Return whether an operation takes two of some values, other than a square, which takes one of them twice."""
    taken = [child for child in graph.inputs(node) if child in values]
    return len(set(taken)) > 1 or (len(taken) > 1 and operation(node) != "Mul")


def _is_chosen(graph: Graph, node: Node | None) -> bool:
    """Return whether values come from a choice, past operations that only rearrange them."""
    while node is not None and operation(node) in LAYOUT and operation(node) != CHOICE:
        node = next(iter(graph.inputs(node)), None)
    return node is not None and operation(node) == CHOICE
