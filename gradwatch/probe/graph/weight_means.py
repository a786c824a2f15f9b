"""Find weights with an initial mean other than zero, and matrices in modules that torch does not define."""

# W = weights that were drawn at random

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from gradwatch.events import MATRIX, WEIGHTS_OFFSET, Observation
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.graph.graph import LAYOUT, TRANSPOSING, Graph, Node, is_leaf, operation
from gradwatch.records import LayerInfo

ONE_SIDED_FRAC = 0.5
"""Mean of a weight's elements divided by their root mean square. It is 0.87 for a uniform distribution from 0 to 1. For
n elements with expectation 0 it is 1 / sqrt(n): 0.125 for 64."""

MIN_ELEMENTS = 64
"""Minimum number of elements of a weight: with fewer, a mean far from zero may be chance."""

MAX_WEIGHTS = 8
"""Maximum number of weights to report: gains multiply, and two are enough."""

FACTORS = {"Mm": 0, "Addmm": 1, "Bmm": 0, "Baddbmm": 1}
"""Products of two matrices, and the position of the first matrix among the arguments."""

TORCH_MODULES = ("Linear", "Conv", "Embedding", "GRU", "LSTM", "RNN")
"""Modules of torch, in which the type gives the number of inputs."""


def find_offset_weights(params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield the weights with a mean far from zero, before the first step.

    Args:
        params: The parameters, before the first step.
        layers: The parameters' descriptions, in the same order.
    """
    drawn = [i for i, param in enumerate(params) if _is_drawn(param)]
    for i, mean in islice(_offsets(params, drawn), MAX_WEIGHTS):
        yield WEIGHTS_OFFSET.observe(layers[i].name, values={"place": i, "mean": mean})


def find_custom_matrices(
    graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]
) -> Iterator[Observation]:
    """Yield the matrices of modules that torch does not define, with the number of their inputs.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    found: dict[int, int] = {}
    for node in graph.of(*FACTORS):
        first = FACTORS[operation(node)]
        leaves = [_leaf(graph, edge) for edge in graph.edges(node)[first : first + 2]]
        known = [(i, *leaf) for i, leaf in enumerate(leaves) if leaf]
        if len(known) != 1:  # of two parameters one is the signal, such as learned queries
            continue
        i, param, is_turned = known[0]
        if param.ndim == 2 and param in index and not _is_weight_of_torch(layers[index[param]]):
            # a product sums over the last dimension of its first factor and the first of its second
            found.setdefault(index[param], param.shape[(i + 1 + is_turned) % 2])
    for i, inputs in sorted(found.items())[:MAX_WEIGHTS]:
        yield MATRIX.observe(layers[i].name, values={"weight": i, "inputs": inputs})


def _is_weight_of_torch(layer: LayerInfo) -> bool:
    return layer.module_type.startswith(TORCH_MODULES) and layer.name.rpartition(".")[2].startswith("weight")


def _is_drawn(param: Tensor) -> bool:
    is_plain = type(param.data) is Tensor and param.is_floating_point() and not param.is_meta  # not a DTensor, say
    return is_plain and param.requires_grad and param.ndim > 1 and param.numel() >= MIN_ELEMENTS


def _offsets(params: Sequence[Tensor], drawn: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield index and mean of the parameters with a mean far from zero, in one wait."""
    if not drawn:
        return  # `torch.stack` rejects an empty list
    flat = [params[i].detach().reshape(-1).float() for i in drawn]
    means = [torch.stack([x.mean(), x.square().mean().sqrt()]) for x in flat]
    means_W2 = to_host(torch.stack([mean_2.to(means[0].device) for mean_2 in means]))
    for i, (mean, size) in zip(drawn, means_W2, strict=True):
        # size 0: a weight of zeros has no sign
        if abs(mean) >= ONE_SIDED_FRAC * size > 0:
            yield i, float(mean)


def _leaf(graph: Graph, node: Node | None) -> tuple[Tensor, bool] | None:
    """Return the parameter behind the views of a factor, and whether the views transpose it."""
    is_turned = False
    while node is not None and operation(node) in LAYOUT:
        inputs = graph.inputs(node)
        is_turned ^= operation(node) in TRANSPOSING
        node = inputs[0] if len(inputs) == 1 else None
    return (node.variable, is_turned) if node is not None and is_leaf(node) else None
