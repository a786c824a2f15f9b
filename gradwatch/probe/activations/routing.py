"""Find routers of mixtures of experts in an autograd graph, and count how many tokens each expert got."""

# N = tokens, K = experts that a token takes, E = experts

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from gradwatch.probe.activations.attention import Saved
from gradwatch.probe.graph.graph import (
    BATCHED,
    LAYOUT,
    LEAF,
    TRANSPOSING,
    Node,
    arguments,
    dimension,
    is_product,
    operation,
    shape,
    through,
)

MAX_COMPARED = 1 << 22
"""Maximum number of choices times experts to compare, at equal distances within a batch: 8,192 tokens, 512 experts."""

MAX_STEPS = 24
"""Maximum number of operations from a weighted expert to its router."""

MAX_EXPERT_NODES = 64
"""Maximum number of nodes to search for the matrix of an expert; norms, activations and orders of tokens come first."""

CHOICES = {"Gather": "index", "Max": "indices", "Topk": "indices"}
"""Operations that select values along a dimension, and the name of their saved indices."""

BEFORE_A_CHOICE = (LAYOUT - TRANSPOSING) | {
    "Add",
    "Div",
    "LogSoftmax",
    "MaskedFill",
    "Mul",
    "Sigmoid",
    "Softmax",
    "Sub",
    "Where",
}
"""Operations that turn logits into scores. No transposition: after one, experts would choose their tokens."""

AFTER_A_CHOICE = LAYOUT | BEFORE_A_CHOICE | {"Scatter"}
"""Operations that turn the chosen scores into weights: often a division by their sum, or a softmax over them alone."""

GROUPED = frozenset({"GroupedMm", "ScaledGroupedMm"})
"""Products of the tokens of each expert with its own slice of one weight."""


class Router(NamedTuple):
    """A choice among experts: the node that chose, the product that made the logits, and the number of experts."""

    choice: Node
    product: Node
    experts: int


def find_router(node: Node) -> Router | None:
    """Return the router behind a product of two values: a chosen score that weights the output of another matrix.

    Names do not matter. A score is chosen if it is among the largest, or gathered, along the last dimension of a
    product with a matrix. Attention chooses nothing; a head of classes weights nothing; experts that choose their
    tokens choose along another dimension; a router by hash has no score.
    """
    factors = arguments(node)
    if len(factors) != 2:  # a constant weights nothing that learns
        return None
    for score, other in (factors, factors[::-1]):
        router = _router_below(score)
        if router is not None and _has_own_matrix(other, router):
            return router
    return None


def is_sample(softmax: Node) -> bool:
    """Return whether a softmax draws from its logits, as `gumbel_softmax` does: noise is added before a temperature.

    The noise is a constant of the graph. Attention adds a mask, which is a constant too.
    """
    below = arguments(softmax)
    if len(below) != 1 or operation(below[0]) != "Div":
        return False
    noisy = arguments(below[0])
    if len(noisy) != 1 or operation(noisy[0]) != "Add":
        return False
    logits = [through(node) for node in arguments(noisy[0])]
    return len(logits) == 1 and (is_product(logits[0]) or operation(logits[0]) not in BATCHED)


def count_tokens(router: Router, saved: Saved) -> Tensor | None:
    """Return how many choices fell on each expert, of shape (1, E), float32; None if the choices are not in memory."""
    name = operation(router.choice)
    if name in CHOICES:
        chosen = saved(router.choice, CHOICES[name])
    else:
        scores = saved(router.choice, "result")
        chosen = None if scores is None else scores.argmax(-1, keepdim=True)
    if chosen is None or not chosen.numel():
        return None
    # `max` without `keepdim` saves one choice a token
    chosen_NK = chosen.reshape(-1, 1 if name == "Max" else chosen.shape[-1])
    stride = -(-chosen_NK.numel() * router.experts // MAX_COMPARED)
    # a histogram would wait for a GPU
    is_chosen = chosen_NK[::stride, :, None] == torch.arange(router.experts, device=chosen.device)
    return stride * is_chosen.sum(dim=(0, 1), dtype=torch.float32)[None]


def _router_below(node: Node) -> Router | None:
    """Return the router of a value that consists of chosen scores, past changes of layout and scale."""
    choice: Node | None = None
    shifts = 0  # additions of a constant
    for _ in range(MAX_STEPS):
        if choice is not None and is_product(node):
            # the hard sample of `gumbel_softmax` is a constant plus a softmax of noise plus logits
            return _checked(choice, node) if operation(choice) in CHOICES or shifts > 1 else None
        name, below = operation(node), arguments(node)
        may_choose = choice is None and (name in CHOICES or (name == "Softmax" and shifts == 1))
        if not below:
            return None
        if may_choose and _is_along_last(node, below[0]):
            choice = node
        elif not (name in BEFORE_A_CHOICE if choice is not None else _keeps_a_choice(name, below)):
            return None
        shifts += name == "Add" and len(below) == 1
        node = below[0]
    return None


def _keeps_a_choice(name: str, below: list[Node]) -> bool:
    """Return whether an operation turns chosen scores into weights, so that each weight is still of one expert."""
    # the sum or product of two values is a residual stream or a gate; a quotient is a share
    return name in AFTER_A_CHOICE and (len(below) == 1 or name in ("Div", "Scatter"))


def _is_along_last(node: Node, below: Node) -> bool:
    """Return whether an operation works along the last dimension of its argument; along another it orders tokens."""
    dims = len(shape(below))
    # the largest of all values has no dimension
    return hasattr(node, "_saved_dim") and dims > 0 and dimension(int(node._saved_dim), dims) == dims - 1


def _checked(choice: Node, product: Node) -> Router | None:
    """Return a router if the choice is among all outputs of a product with a weight."""
    sizes, experts = shape(arguments(choice)[0]), shape(product)[-1]
    has_weight = any(operation(through(factor)) == LEAF for factor in arguments(product)[-2:])
    is_router = has_weight and operation(product) != "Convolution" and sizes[-1] == experts > 1
    return Router(choice, product, experts) if is_router else None


def _has_own_matrix(node: Node, router: Router) -> bool:
    """Return whether the nearest matrix below a value is not that of the router."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < MAX_EXPERT_NODES:
        at = waiting.popleft()
        if is_product(at) or operation(at) in GROUPED:
            return at is not router.product
        for child in arguments(at):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return False
