"""Measure how much of the targets lies outside of the range of the last activation of a model."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gradwatch.probe.batches.loss_forms import Floats, dot
from gradwatch.probe.graph.graph import Graph, Node, operation, through
from gradwatch.probe.parameters import Models, named_modules

MAX_NODES = 64
"""Maximum number of nodes to visit for the parameter in front of an activation."""


class OutputRange(NamedTuple):
    """The activation that computes an output, and the numbers between which its results lie.

    Args:
        activation: Display name.
        least: Least result, or its limit.
        most: Largest result, or its limit.
    """

    activation: str
    least: float
    most: float


RANGES = {
    "Exp": OutputRange("exp", 0, math.inf),
    "Hardsigmoid": OutputRange("hardsigmoid", 0, 1),
    "Relu": OutputRange("ReLU", 0, math.inf),
    "Sigmoid": OutputRange("sigmoid", 0, 1),
    "Softmax": OutputRange("softmax", 0, 1),
    "Softplus": OutputRange("softplus", 0, math.inf),
    "Tanh": OutputRange("tanh", -1, 1),
}
"""Ranges of activations, by operation of the autograd graph."""


def range_of(output: Tensor) -> OutputRange | None:
    """Return the range of an output, or None if its last operation is not a bounded activation."""
    node = last_operation(output)
    return RANGES.get(operation(node)) if node is not None else None


def name_of_activation(output: Tensor, models: Models) -> str | None:
    """Return the name of the activation that computes an output, or None if it follows no parameter.

    Args:
        output: An output with a range.
        models: A model, or several by name.

    Returns:
        The module that follows the one with the nearest parameter, if it is the activation; for a function, the name of
        that module with the operation, such as `head.relu`.
    """
    node = last_operation(output)
    param = Graph(output, max_nodes=MAX_NODES).parameter(node) if node is not None else None
    modules = list(named_modules(models))
    owners = [i for i, (_, module) in enumerate(modules) if any(p is param for p in module.parameters(recurse=False))]
    if not owners or node is None:
        return None
    (owner, _), *later = modules[owners[0] :]
    kind = operation(node).lower()
    following = next(((name, it) for name, it in later if not [*it.children()]), None)
    if following and type(following[1]).__name__.lower() == kind:
        return following[0]
    return f"{owner}.{kind}" if owner else kind


def last_operation(output: Tensor) -> Node | None:
    """Return the operation that computes an output, below its changes of layout."""
    return None if output.grad_fn is None else through(output.grad_fn)


def unreachable_share(targets: Floats, limits: OutputRange) -> float:
    """Return the mean squared distance of the targets from a range, as a fraction of their variance.

    It is the fraction of the loss of the best constant that no model with this activation can remove.
    """
    beyond, centered = targets - np.clip(targets, limits.least, limits.most), targets - targets.mean(0)
    variance = dot(centered, centered)
    return float(dot(beyond, beyond) / variance) if variance > 0 else 0.0
