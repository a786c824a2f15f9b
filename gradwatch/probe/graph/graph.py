"""Walk the autograd graph from a loss down to the parameters: names, shapes and edges, never the saved tensors."""

from __future__ import annotations

import contextlib
import gc
import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

MAX_NODES = 10_000
"""Maximum number of nodes to visit: a transformer of 1,000 parameter tensors has about 5,000."""

LAYOUT = frozenset(
    {
        "Alias",
        "AsStrided",
        "Clone",
        "Contiguous",
        "Copy",
        "Diagonal",
        "Expand",
        "Flatten",
        "Gather",
        "Index",
        "IndexSelect",
        "MaskedSelect",
        "Movedim",
        "Permute",
        "Repeat",
        "Reshape",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "Unbind",
        "Unflatten",
        "UnsafeSplit",
        "UnsafeView",
        "Unsqueeze",
        "View",
    }
)
"""Operations that rearrange or convert values without computing new ones."""

TRANSPOSING = frozenset({"Permute", "T", "Transpose"})
"""Operations that change the order of the axes."""

FUSED_ATTENTIONS = (
    "ScaledDotProductCudnnAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFusedAttentionOverrideable",
)
"""Operations of `scaled_dot_product_attention` in one kernel, which never has the logits in memory.

Their results have the shape (samples, heads, steps, features).
"""

SOFTMAX = ("SafeSoftmax", "Softmax")
"""Softmax; `SafeSoftmax` is that of `scaled_dot_product_attention` if no fused kernel applies."""

LINEAR = frozenset({"Addmm", "Mm", "Linear", "Convolution"})
"""Products with a matrix. A linear layer has no other operation, except perhaps one that adds the bias."""

BATCHED = frozenset({"Bmm", "Baddbmm"})
"""Batched matrix products: `einsum` makes one of a product with a weight, attention one of queries and keys."""

LEAF = "AccumulateGrad"
"""Operation of a node that accumulates the gradient of a parameter."""

Node = Any
"""A node of the graph: torch has no public type for `grad_fn`."""


@final
class Graph:
    """The nodes of one autograd graph and their edges. It keeps the nodes alive: drop it after the inspection.

    Args:
        outputs: A loss or outputs, each with a `grad_fn`; before or after the backward pass.
        max_nodes: Maximum number of nodes to visit; None for `MAX_NODES`.

    Attributes:
        outputs: The nodes of the outputs.
        nodes: The visited nodes, nearest to the outputs first.
        is_complete: Whether every node was visited.
    """

    def __init__(self, *outputs: Tensor, max_nodes: int | None = None) -> None:
        limit = MAX_NODES if max_nodes is None else max_nodes  # read here, so that tests can patch the constant
        self.nodes: list[Node] = []
        self._edges: dict[Node, tuple[Node | None, ...]] = {}
        self._by_operation: dict[str, list[Node]] = {}
        self._users: dict[Node, list[Node]] = {}
        # several outputs may share a node; a dict keeps their order
        self.outputs: list[Node] = list(dict.fromkeys(output.grad_fn for output in outputs))
        waiting: deque[Node] = deque(self.outputs)
        seen: set[Node] = set(waiting)
        while waiting and len(self.nodes) < limit:
            node = waiting.popleft()
            self.nodes.append(node)
            self._by_operation.setdefault(operation(node), []).append(node)
            # each access of `next_functions` makes a new tuple, so the edges are kept
            edges = tuple([child for child, _ in node.next_functions])
            self._edges[node] = edges
            for child in edges:
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)
        self.is_complete = not waiting

    def of(self, *operations: str) -> list[Node]:
        """Return the nodes of some operations, within one operation the nearest to the loss first."""
        return [node for name in operations for node in self._by_operation.get(name, ())]

    def edges(self, node: Node) -> tuple[Node | None, ...]:
        """Return the node of each argument of an operation; None for a constant."""
        return self._edges.get(node, ())

    def inputs(self, node: Node) -> list[Node]:
        """Return the nodes of the arguments of an operation, without constants."""
        return [child for child in self.edges(node) if child is not None]

    def first(self, node: Node) -> Node | None:
        """Return the node of the first argument of an operation."""
        return next(iter(self.edges(node)), None)

    def through(self, node: Node | None, *, also: frozenset[str] = frozenset()) -> Node | None:
        """Return the operation that computed the values, past operations that only rearrange them.

        Args:
            node: First node.
            also: Further operations to pass if they have exactly one input that is not a constant.
        """
        while node is not None and (operation(node) in LAYOUT or operation(node) in also):
            inputs = self.inputs(node)
            if len(inputs) != 1:  # several values are combined here
                break
            node = inputs[0]
        return node

    def past_bias(self, node: Node | None) -> Node | None:
        """Return the value to which an operation adds a bias, or the operation itself.

        A linear layer has one operation for both, unless its input has more than two dimensions and is not contiguous.
        """
        if node is None or operation(node) != "Add":
            return node
        inputs = self.inputs(node)
        biases = [child for child in inputs if is_leaf(child) and child.variable.ndim == 1]
        others = [child for child in inputs if child not in biases]
        return others[0] if len(biases) == len(others) == 1 else node

    def side(self, operations: frozenset[str]) -> list[Node]:
        """Return the nodes from the loss down to the first of another operation, inclusive, on every path."""
        side, waiting = {self.nodes[0]: None}, [self.nodes[0]]  # a dict keeps the order
        while waiting:
            node = waiting.pop()
            if operation(node) in operations:
                new = [child for child in self.inputs(node) if child not in side]
                side.update(dict.fromkeys(new))
                waiting += new
        return list(side)

    def below(self, node: Node) -> Iterator[Node]:
        """Yield a node and all nodes that it depends on, the nearest first."""
        waiting, seen = deque([node]), {node}
        while waiting:
            node = waiting.popleft()
            yield node
            for child in self.inputs(node):
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)

    def users(self, node: Node) -> list[Node]:
        """Return the nodes that use a value."""
        if not self._users:  # built at the first call, for the inspections that walk up
            for user in self.nodes:
                for child in self.inputs(user):
                    self._users.setdefault(child, []).append(user)
        return list(self._users.get(node, ()))  # a copy: callers extend the list

    def above(self, node: Node) -> set[Node]:
        """Return the nodes that depend on a node."""
        waiting, above = [node], set[Node]()
        while waiting:
            new = [user for user in self.users(waiting.pop()) if user not in above]
            above.update(new)
            waiting += new
        return above

    def parameter(self, node: Node) -> Tensor | None:
        """Return the nearest parameter that a node depends on."""
        return next((leaf.variable for leaf in self.below(node) if is_leaf(leaf)), None)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector, which would traverse the many nodes that an inspection holds."""
    was_enabled = gc.isenabled()  # the loop may have disabled it
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def operation(node: Node) -> str:
    """Return the operation of a node: `LogSoftmax` for `LogSoftmaxBackward0`."""
    return NAMES.get(type(node)) or _operation(node.name())


def is_leaf(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a parameter."""
    return operation(node) == LEAF


def arguments(node: Node) -> list[Node]:
    """Return the nodes of the arguments of an operation; a constant has no node."""
    return [child for child, _ in node.next_functions if child is not None]


def through(node: Node) -> Node:
    """Return the operation that computed the values, past operations that only rearrange them."""
    while operation(node) in LAYOUT and len(below := arguments(node)) == 1:
        node = below[0]
    return node


def is_product(node: Node) -> bool:
    """Return whether a node multiplies by a matrix; a batched product must have a parameter."""
    name = operation(node)
    if name not in BATCHED:
        return name in LINEAR
    # the factors come last: before them a Baddbmm has the tensor that it adds
    factors = [factor for factor, _ in node.next_functions[-2:] if factor is not None]
    return any(is_leaf(through(factor)) for factor in factors)


def shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the result of a node."""
    # `int`: sizes may be symbolic
    return tuple(int(size) for size in node._input_metadata[0].shape)


def dimension(saved: int, dims: int) -> int:
    """Return a dimension counted from the front.

    Args:
        saved: Dimension as a node saves it.
        dims: Number of dimensions.
    """
    return signed(saved) % dims


def signed(number: int) -> int:
    """Return the int64 that has the same bits as a number below 2^64: so a node saves a negative one."""
    return int(number - (1 << 64) if number >= 1 << 63 else number)


@cache
def _operation(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.removeprefix("torch::autograd::"))


NAMES = {kind: _operation(name) for name, kind in vars(torch._C._functions).items() if isinstance(kind, type)}
"""Operations of torch's own node types: the `name` method of a node takes a microsecond."""
