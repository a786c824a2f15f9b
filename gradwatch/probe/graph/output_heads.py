"""Find layers that run in parallel, as output heads and numbered experts do, or in another order than expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from gradwatch.events import DEPTHS, HEADS, SIDE_BY_SIDE, TOWERS, Observation
from gradwatch.probe.graph.graph import LINEAR, Graph, Node, is_leaf, operation
from gradwatch.records import LayerInfo

MAX_HEADS = 8
"""Maximum number of heads in a loss that is a sum of comparable tasks."""

MIN_EXPERTS = 3
"""Minimum number of parallel modules: one may be skipped, and more than half still run."""

MAX_GROUPS = 8
"""Maximum number of groups of numbered modules to check in one graph: each takes two walks over the graph."""

TABLE_LOOKUPS = ("Embedding", "EmbeddingBag")


def find_heads(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield the weights of the output heads, if there are several and all share an earlier weight.

    If the heads end parts that share no weight, and several of them have more than one, the parts are yielded.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    last = _last_weights(graph, index)
    if not 1 < len(last) <= MAX_HEADS:
        return
    below = {weight: {index[p] for p in _weights_below(graph, node, index)} for weight, node in last.items()}
    # the latent of an autoencoder is in the loss too, but its layer comes before the decoder
    heads = [weight for weight in last if not any(weight in below[other] for other in last if other != weight)]
    if len(heads) < 2:
        return
    # towers without a shared weight have no trunk to compete for
    before = [below[weight] for weight in heads]
    if set.intersection(*before) - set(heads):
        yield HEADS.observe(values={layers[i].name: i for i in sorted(heads)}, heads=len(heads))
    towers = _joined(before)
    if sum(len(tower) > 1 for tower in towers) > 1:
        values = {layers[i].name: float(number) for number, tower in enumerate(towers) for i in sorted(tower)}
        yield TOWERS.observe(values=values, towers=len(towers))


def find_parallel_modules(
    graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]
) -> Iterator[Observation]:
    """Yield the parent of each group of numbered modules of equal shape that do not compute with each other's outputs.

    Arguments as for `find_heads`.
    """
    groups = _numbered_modules(layers)
    if not groups:
        return
    used: dict[str, Node] = {}
    for node in graph.nodes:
        weight = weight_of(graph, node, index)
        if weight is not None:
            used.setdefault(layers[weight].name, node)
    # the first two are enough: blocks in a row depend on each other in one direction
    for parent, modules in list(groups.items())[:MAX_GROUPS]:
        run = [nodes for names in modules.values() if (nodes := [used[name] for name in names if name in used])]
        if len(run) > 1 and not any(_depends(graph, *pair) for pair in ((run[0], run[1]), (run[1], run[0]))):
            yield SIDE_BY_SIDE.observe(parent, values={"modules": len(modules)})


def find_depths(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield how deep each weight lies below the loss, if the layers are not registered from the input to the output.

    The depth is the number of layers on the longest path from the loss, with the layer itself. A weight that is used
    repeatedly has the depth of its first use. A table that is looked up has none. Arguments as for `find_heads`.
    """
    tables = {leaf.variable for node in graph.of(*TABLE_LOOKUPS) for leaf in graph.inputs(node) if is_leaf(leaf)}
    depths: dict[int, int] = {}
    layers_above = dict.fromkeys(graph.nodes, 0)
    users_left = {node: len(graph.users(node)) for node in graph.nodes}
    ready = [node for node, users in users_left.items() if not users]
    while ready:
        node = ready.pop()
        weight, depth = weight_of(graph, node, index), layers_above[node]
        if weight is not None:
            depth += 1
            depths[weight] = max(depth, depths.get(weight, depth))
        for child in graph.inputs(node):
            layers_above[child] = max(depth, layers_above[child])
            users_left[child] -= 1
            if not users_left[child]:
                ready.append(child)
    for table in tables & index.keys():
        depths.pop(index[table], None)
    if any(depths[before] < depths[after] for before, after in pairwise(sorted(depths))):
        yield DEPTHS.observe(values={layers[i].name: float(depth) for i, depth in sorted(depths.items())})


def weight_of(graph: Graph, node: Node, index: Mapping[Tensor, int]) -> int | None:
    """Return the index of the parameter that an operation multiplies by, or None."""
    if operation(node) not in LINEAR:
        return None
    factors = [graph.through(child) for child in graph.inputs(node)]
    # a bias is a leaf of the same node, but has one dimension
    leaves = [leaf.variable for leaf in factors if leaf is not None and is_leaf(leaf) and leaf.variable.ndim > 1]
    return next((index[leaf] for leaf in leaves if leaf in index), None)


def _last_weights(graph: Graph, index: Mapping[Tensor, int]) -> dict[int, Node]:
    """Return the weights that a walk from the loss meets first, with the operations that multiply by them."""
    heads: dict[int, Node] = {}
    waiting, seen = deque([graph.nodes[0]]), {graph.nodes[0]}
    while waiting and len(heads) <= MAX_HEADS:
        node = waiting.popleft()
        weight = weight_of(graph, node, index)
        if weight is not None:
            heads.setdefault(weight, node)
            continue  # below a head lie the layers before it
        new = [child for child in graph.inputs(node) if child not in seen]
        seen.update(new)
        waiting += new
    return heads


def _weights_below(graph: Graph, node: Node, index: Mapping[Tensor, int]) -> Iterator[Tensor]:
    for leaf in graph.below(node):
        if is_leaf(leaf) and leaf.variable in index and leaf.variable.ndim > 1:
            yield leaf.variable


def _joined(groups: Sequence[set[int]]) -> list[set[int]]:
    """Return the groups, with those that have members in common merged."""
    joined: list[set[int]] = []
    for group in groups:
        apart = [other for other in joined if not other & group]
        joined = [*apart, group.union(*(other for other in joined if other & group))]
    return joined


def _numbered_modules(layers: Sequence[LayerInfo]) -> dict[str, dict[str, list[str]]]:
    """Return tensor names by parent and number, for parents with numbered modules that all have equal shapes."""
    found: dict[str, dict[str, list[LayerInfo]]] = {}
    for layer in layers:
        parts = layer.name.split(".")
        # a number at the start has no parent that could be named
        for i in (i for i, part in enumerate(parts) if part.isdigit() and i > 0):
            found.setdefault(".".join(parts[:i]), {}).setdefault(parts[i], []).append(layer)
    return {
        parent: {number: [layer.name for layer in own] for number, own in modules.items()}
        for parent, modules in found.items()
        if len(modules) >= MIN_EXPERTS and len({tuple(layer.shape for layer in own) for own in modules.values()}) == 1
    }


def _depends(graph: Graph, ones: Sequence[Node], others: Sequence[Node]) -> bool:
    """Return whether the first of some operations computes with the result of any of the others."""
    # without leaves: shared weights are not a dependency
    below = {node for one in ones[:1] for node in graph.below(one) if not is_leaf(node)}
    return any(node in below for node in others)
