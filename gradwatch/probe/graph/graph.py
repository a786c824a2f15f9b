"""Walk the autograd graph from a loss down to the parameters: names, shapes and edges, never the tensors it keeps."""

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

MOST_NODES = 10_000
"""Nodes that are looked at: a transformer of 1,000 parameter tensors has about 5,000."""

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
"""Operations that move values about, or to another format, and leave them what they are."""

LEAF = "AccumulateGrad"
"""What a node is where the gradient of a parameter comes to rest."""

Node = Any
"""A node of the graph: torch has no public type for what `grad_fn` gives."""


@final
class Graph:
    """What one walk saw. It holds the nodes, and so must not outlive the look at them.

    Args:
        loss: With a `grad_fn`; its backward pass may be done.

    Attributes:
        nodes: In the order of their distance from the loss.
        is_complete: Whether that is all of them.
    """

    def __init__(self, loss: Tensor) -> None:
        self.nodes: list[Node] = []
        self._edges: dict[Node, tuple[Node | None, ...]] = {}
        self._by_operation: dict[str, list[Node]] = {}
        self._users: dict[Node, list[Node]] = {}
        waiting: deque[Node] = deque([loss.grad_fn])
        seen: set[Node] = {loss.grad_fn}
        while waiting and len(self.nodes) < MOST_NODES:
            node = waiting.popleft()
            self.nodes.append(node)
            self._by_operation.setdefault(operation(node), []).append(node)
            edges = tuple([child for child, _ in node.next_functions])
            self._edges[node] = edges
            for child in edges:
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)
        self.is_complete = not waiting

    def of(self, *operations: str) -> list[Node]:
        """Return the nodes of some operations, those of one operation in the order of their distance."""
        return [node for name in operations for node in self._by_operation.get(name, ())]

    def edges(self, node: Node) -> tuple[Node | None, ...]:
        """Return what each argument of an operation came from; None for a constant."""
        return self._edges.get(node, ())

    def inputs(self, node: Node) -> list[Node]:
        """Return what the arguments of an operation came from, without constants."""
        return [child for child in self.edges(node) if child is not None]

    def first(self, node: Node) -> Node | None:
        """Return what the first argument of an operation came from."""
        return next(iter(self.edges(node)), None)

    def through(self, node: Node | None, *, also: frozenset[str] = frozenset()) -> Node | None:
        """Return the operation that made the values, behind those that only move them about.

        Args:
            node: Where to begin.
            also: Further operations to pass, where they have one input that is no constant.
        """
        while node is not None and (operation(node) in LAYOUT or operation(node) in also):
            inputs = self.inputs(node)
            if len(inputs) != 1:
                break
            node = inputs[0]
        return node

    def side(self, operations: frozenset[str]) -> list[Node]:
        """Return the nodes that lie between the loss and the first that is none of some operations, these included."""
        side, waiting = {self.nodes[0]: None}, [self.nodes[0]]  # a dict keeps the order
        while waiting:
            node = waiting.pop()
            if operation(node) in operations:
                new = [child for child in self.inputs(node) if child not in side]
                side.update(dict.fromkeys(new))
                waiting += new
        return list(side)

    def below(self, node: Node) -> Iterator[Node]:
        """Yield a node and all that it depends on, the nearest first."""
        waiting, seen = deque([node]), {node}
        while waiting:
            node = waiting.popleft()
            yield node
            for child in self.inputs(node):
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)

    def users(self, node: Node) -> list[Node]:
        """Return the nodes that a value goes into."""
        if not self._users:
            for user in self.nodes:
                for child in self.inputs(user):
                    self._users.setdefault(child, []).append(user)
        return list(self._users.get(node, ()))

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
    """Keep Python's cyclic garbage collector from going through the many nodes that a look holds for a moment."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def operation(node: Node) -> str:
    """Return what a node computes: `LogSoftmax` for `LogSoftmaxBackward0`."""
    return NAMES.get(type(node)) or _operation(node.name())


def is_leaf(node: Node) -> bool:
    """Say whether a node is where the gradient of a parameter comes to rest."""
    return operation(node) == LEAF


def shape(node: Node) -> tuple[int, ...]:
    """Return the shape of what a node computes."""
    return tuple(int(size) for size in node._input_metadata[0].shape)


@cache
def _operation(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.removeprefix("torch::autograd::"))


NAMES = {kind: _operation(name) for name, kind in vars(torch._C._functions).items() if isinstance(kind, type)}
"""What nodes of torch's own types compute: a node takes a microsecond to say its name."""
