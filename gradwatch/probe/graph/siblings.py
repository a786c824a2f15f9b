"""Find on the tape of a loss modules that stand side by side, as experts do, and not one behind another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from gradwatch.probe.graph.graph import Graph, Node, is_leaf
from gradwatch.probe.graph.output_heads import weight_of
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""

AT_LEAST = 3
"""Modules of which one may be left out and more than half are still there."""

MOST_GROUPS = 8
"""Groups of one look at most: each takes two walks over the graph."""


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the module that holds them, for each group of numbered modules that are alike and side by side.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    groups = _numbered(layers)
    if not groups:
        return
    used: dict[str, Node] = {}
    for node in graph.nodes:
        weight = weight_of(graph, node, index)
        if weight is not None:
            used.setdefault(layers[weight].name, node)
    for parent, modules in list(groups.items())[:MOST_GROUPS]:
        there = [nodes for names in modules.values() if (nodes := [used[name] for name in names if name in used])]
        if len(there) > 1 and not any(_reaches(graph, *pair) for pair in ((there[0], there[1]), (there[1], there[0]))):
            text = f"{len(modules)} modules stand side by side"
            yield "tape-side-by-side", parent, text, {"modules": float(len(modules))}


def _numbered(layers: Sequence[LayerInfo]) -> dict[str, dict[str, list[str]]]:
    """Return the tensors of numbered modules by what holds them and by number, where all have the same shapes."""
    found: dict[str, dict[str, list[LayerInfo]]] = {}
    for layer in layers:
        parts = layer.name.split(".")
        for place in (i for i, part in enumerate(parts) if part.isdigit() and i > 0):
            found.setdefault(".".join(parts[:place]), {}).setdefault(parts[place], []).append(layer)
    return {
        parent: {number: [layer.name for layer in mine] for number, mine in modules.items()}
        for parent, modules in found.items()
        if len(modules) >= AT_LEAST and len({tuple(layer.shape for layer in mine) for mine in modules.values()}) == 1
    }


def _reaches(graph: Graph, ones: Sequence[Node], others: Sequence[Node]) -> bool:
    """Say whether what some operations compute is made of what others do."""
    below = {node for one in ones[:1] for node in graph.below(one) if not is_leaf(node)}
    return any(node in below for node in others)
