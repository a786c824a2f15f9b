"""Find weights that were drawn about a number other than zero, and matrices in modules of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwatch.probe.device.sync import to_host
from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, is_leaf, operation
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""

ONE_SIDED = 0.5
"""Mean of a weight's elements in units of their root mean square: 0.87 where they are uniform from 0 to 1, and, drawn
about zero, one divided by the root of their number: 0.125 for 64."""

LEAST = 64
"""Elements from which the mean of numbers drawn about zero is near zero."""

MOST = 8
"""Weights that are told: gains multiply, and two are enough."""

FACTORS = {"Mm": 0, "Addmm": 1, "Bmm": 0, "Baddbmm": 1}
"""Products of two matrices, and the place of the first among the arguments."""

KNOWN = ("Linear", "Conv", "Embedding", "GRU", "LSTM", "RNN")
"""Modules whose weights are known by their type."""

TURNS = frozenset({"T", "Transpose", "Permute"})


def facts(params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the weights whose elements have a mean, before the first step.

    Args:
        params: The parameters, before the first step.
        layers: What they are.
    """
    wide = [i for i, param in enumerate(params) if _is_drawn(param)]
    devices: dict[torch.device, list[int]] = {}
    for i in wide:
        devices.setdefault(params[i].device, []).append(i)
    means = {i: mean for group in devices.values() for i, mean in _offsets(params, group)}
    for i in sorted(means)[:MOST]:
        yield (
            "weights-offset",
            layers[i].name,
            "drawn about a number other than 0",
            {"place": float(i), "mean": means[i]},
        )


def matrices(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the parameters of modules that torch does not know by which the model multiplies, with their inputs.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        layers: What they are.
    """
    found: dict[int, int] = {}
    for node in graph.of(*FACTORS):
        first = FACTORS[operation(node)]
        leaves = [_leaf(graph, edge) for edge in graph.edges(node)[first : first + 2]]
        known = [(place, *leaf) for place, leaf in enumerate(leaves) if leaf]
        if len(known) != 1:  # of two parameters one is the signal, such as learned queries
            continue
        place, param, is_turned = known[0]
        if param.ndim == 2 and param in index and not layers[index[param]].module_type.startswith(KNOWN):
            found.setdefault(index[param], param.shape[(place + 1 + is_turned) % 2])
    for i, inputs in sorted(found.items())[:MOST]:
        yield "tape-matrix", layers[i].name, f"{inputs} inputs", {"weight": float(i), "inputs": float(inputs)}


def _is_drawn(param: Tensor) -> bool:
    is_plain = type(param.data) is Tensor and param.is_floating_point() and not param.is_meta  # and not sharded, say
    return is_plain and param.requires_grad and param.ndim > 1 and param.numel() >= LEAST


def _offsets(params: Sequence[Tensor], group: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield those of some parameters of one device that have a mean, in one wait."""
    flat = [params[i].detach().reshape(-1).float() for i in group]
    means_GS = to_host(torch.stack([torch.stack([x.mean(), x.square().mean().sqrt()]) for x in flat]))
    for i, (mean, size) in zip(group, means_GS, strict=True):
        if abs(mean) >= ONE_SIDED * size > 0:
            yield i, float(mean)


def _leaf(graph: Graph, node: Node | None) -> tuple[Tensor, bool] | None:
    """Return the parameter that is all that a factor is made of, and whether it was turned on the way."""
    is_turned = False
    while node is not None and operation(node) in LAYOUT:
        inputs = graph.inputs(node)
        is_turned ^= operation(node) in TURNS
        node = inputs[0] if len(inputs) == 1 else None
    return (node.variable, is_turned) if node is not None and is_leaf(node) else None
