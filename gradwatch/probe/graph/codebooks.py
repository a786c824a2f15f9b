"""Find on the tape of a loss the tables whose rows are drawn to fixed values, as the codes of a quantiser are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.probe.graph.embeddings import LOOKUPS
from gradwatch.probe.graph.graph import LAYOUT, Graph, is_leaf, operation
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""

DISTANCES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "Sub", "Rsub")
"""Operations that compare two values, of which one is held fixed."""


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield each table of which rows are looked up and drawn to what they stand for, which is held fixed meanwhile.

    Which rows these are is chosen by what the model computes; a row that is not chosen has no gradient.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    for node in graph.of(*DISTANCES):
        inputs = graph.inputs(node)
        while len(inputs) == 1 and operation(inputs[0]) in LAYOUT - LOOKUPS:
            inputs = graph.inputs(inputs[0])
        if len(inputs) != 1 or operation(inputs[0]) not in LOOKUPS:
            continue
        leaf = graph.through(graph.first(inputs[0]))
        if leaf is not None and is_leaf(leaf) and leaf.variable in index and leaf.variable.ndim == 2:
            name = layers[index[leaf.variable]].name
            yield "tape-codebook", name, f"rows of {name} are drawn to what they stand for", {}
