"""Measure by how much a gradient grows or shrinks on its way back through the uses of one parameter."""

# U = uses of a parameter, in the order of the forward pass

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.device.sync import HostTransfer, is_capturing
from gradwatch.probe.graph.graph import LAYOUT, Node, is_leaf, operation
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.parameters import Models, describe

MOST_NODES = 10_000
"""Nodes that are looked at in one step: 10 ms."""

ROUNDS = 3
"""Looks without a recurrence after which none is looked for any more."""

USES = 12
"""Uses in a row from which on a parameter is that of a recurrence: weights that are tied by hand have fewer."""

MOST_READ = 24
"""Of them that are measured, evenly spread."""

TOLD = 2.0
"""Growth from the last use to the first, or its opposite, in powers of ten, from which on it is told."""

SMALLEST = 1.4e-45
"""What is smaller is zero in float32."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


@final
class Recurrences:
    """Reads gradients at the uses of a parameter that a forward pass applies to its own result again and again.

    Cells in a loop, state-space models, solvers of differential equations, layers with tied weights: where each use
    multiplies the gradient by a little more than 1, a hundred of them multiply it by a million. The graph that a
    forward pass has left behind tells which uses there are; hooks on its nodes note the norms of what a backward
    passes through them, and go with the graph. What torch computes in one node, as its LSTM may be, is not seen.
    From a GPU the norms come when they come: a later call of `facts` has them.

    Sampled steps are looked at ever more seldom: the 1st, 2nd, 3rd, 5th, 9th. So are calls within a step, where a loop
    outside of the model makes them: each has the graph of all before behind it.

    Args:
        models: A model, or several by name.

    Attributes:
        is_over: Whether nothing more is looked at: something was told, or there is no recurrence.
    """

    def __init__(self, models: Models) -> None:
        params, layers = describe(models)
        self._names: dict[Tensor, str] = {param: layer.name for param, layer in zip(params, layers, strict=True)}
        self._handles: list[RemovableHandle] = []
        self._norms_U: list[Tensor | None] = []
        self._transfer: HostTransfer | None = None  # of norms, in flight
        self._name, self._uses = "", 0
        self._of = self._name, self._uses  # of those
        self._steps, self._rounds, self.is_over = 0, 0, False
        self._is_sampled = False
        self._calls, self._next, self._nodes = 0, 0, 0

    def begin(self) -> None:
        """Make ready for the next sampled step, and forget the one before."""
        self.clear()
        is_due = not self._steps & (self._steps - 1)  # 0 and the powers of two
        self._calls, self._next, self._nodes = 0, int(is_due and self._transfer is None), MOST_NODES
        self._is_sampled = True

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` takes back; norms that are on their way are not waited for."""
        return {"steps": self._steps, "rounds": self._rounds, "is_over": self.is_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, also where a sampled step has begun."""
        self._steps, self._rounds, self.is_over = state["steps"], state["rounds"], state["is_over"]
        if self._is_sampled:
            self.begin()

    def clear(self) -> None:
        """Take off what hooks there are, and let go of what they noted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._norms_U, self._uses = [], 0

    def look(self, output: Any) -> None:
        """Find the uses of a parameter in what led to the output of a forward pass, and have their gradients read."""
        self._calls += 1
        if self.is_over or self._calls != self._next:
            return
        tensors = [tensor for tensor in tensors_of(output) if tensor.grad_fn is not None]
        if is_capturing(tensors):
            return
        self._next += max(1, self._next // 2)
        uses_by_leaf, count = _uses([tensor.grad_fn for tensor in tensors], self._nodes)
        self._nodes -= count
        for leaf, uses in uses_by_leaf:
            if leaf in self._names and len(uses) >= max(USES, self._uses + 1):
                self._read(self._names[leaf], uses)

    def facts(self) -> Iterator[Fact]:
        """Yield the parameter through whose uses the gradient has grown or shrunk, after a backward pass."""
        self._steps, self._is_sampled = self._steps + self._is_sampled, False
        if self._calls and self._next:
            self._rounds = 0 if self._norms_U else self._rounds + 1
            self.is_over = self._rounds == ROUNDS
            self._send()
            self._calls = self._next = 0
        if self._transfer is None or not self._transfer.is_ready:
            return
        growth, self._transfer = growth_of(self._transfer.values()["norms"]), None
        if abs(growth) >= TOLD:
            self.is_over = True
            name, uses = self._of
            text = f"the gradient changes by a factor of 10^{growth:.1f} on its way back through {uses} uses"
            yield "tape-recurrence", name, text, {"uses": float(uses), "growth": growth}

    def _send(self) -> None:
        """Send the norms that were noted to the host, where the backward pass has come by all of them."""
        read_U = [norm for norm in self._norms_U if norm is not None]
        if len(read_U) == len(self._norms_U) > 0 and len({norm.device for norm in read_U}) == 1:
            self._transfer, self._of = HostTransfer({"norms": torch.stack(read_U)}), (self._name, self._uses)
        self.clear()

    def _read(self, name: str, uses: list[Node]) -> None:
        """Have the gradients at some uses read, if each follows from the one before."""
        uses = sorted(uses, key=lambda node: node._sequence_nr())
        if not _leads_to(uses[0], uses[-1]):
            return
        self.clear()
        self._name, self._uses = name, len(uses)
        count = min(MOST_READ, len(uses))
        places = [k * (len(uses) - 1) // (count - 1) for k in range(count)]
        self._norms_U = [None] * len(places)
        for place, use in enumerate(places):
            self._handles.append(uses[use].register_prehook(_Read(self._norms_U, place)))


@final
class _Read:
    """The hook on a node: it notes the norm of the gradient that arrives."""

    def __init__(self, norms_U: list[Tensor | None], place: int) -> None:
        self._norms_U, self._place = norms_U, place

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0] if gradients else None
        if gradient is not None:
            self._norms_U[self._place] = gradient.detach().float().norm()


def growth_of(norms_U: np.ndarray[Any, Any]) -> float:
    """Return by how many powers of ten norms rise towards the first use, beyond what comes to them by the way, or fall.

    A loss at each place of a sequence adds something at each use, so that a gradient that is only handed on grows as
    the way does: hardly more than twofold over the earlier half of it, by which the growth is told.

    Args:
        norms_U: Norms at uses that are evenly spread, in the order of the forward pass, of shape (U,).
    """
    few, middle = len(norms_U) // 8, len(norms_U) // 2
    if not few or not np.isfinite(norms_U).all() or not norms_U[-1] > 0:
        return 0.0
    log_U = np.log10(np.maximum(norms_U, SMALLEST))
    rise = float(np.median(log_U[:few]) - np.median(log_U[middle : middle + few]))
    beyond = rise - float(np.log10(2)) if rise > 0 else rise
    return beyond * (len(norms_U) - 1) / middle if beyond * rise > 0 else 0.0


def _uses(roots: list[Node], most: int) -> tuple[list[tuple[Tensor, list[Node]]], int]:
    """Return each leaf of a graph with the operations that use it, behind those that only change its layout.

    Args:
        roots: Where the graph begins.
        most: How many nodes to look at.

    Returns:
        The leaves with their uses, and how many nodes were looked at.
    """
    used_by: dict[Node, list[Node]] = {}
    waiting, seen = list(dict.fromkeys(roots)), set(roots)
    leaves: list[Node] = []
    while waiting and len(seen) < most:
        node = waiting.pop()
        if is_leaf(node):
            leaves.append(node)
        for child, _ in node.next_functions:
            if child is not None:
                used_by.setdefault(child, []).append(node)
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
    return [(leaf.variable, list(_behind_layout(leaf, used_by))) for leaf in leaves], len(seen)


def _behind_layout(leaf: Node, used_by: dict[Node, list[Node]]) -> Iterator[Node]:
    waiting = list(used_by.get(leaf, ()))
    while waiting:
        node = waiting.pop()
        if operation(node) in LAYOUT:
            waiting += used_by.get(node, ())
        else:
            yield node


def _leads_to(first: Node, last: Node) -> bool:
    """Say whether an operation computes with what an earlier one has given."""
    oldest = first._sequence_nr()
    waiting, seen = [last], {last}
    while waiting:
        node = waiting.pop()
        if node is first:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen and child._sequence_nr() >= oldest:
                seen.add(child)
                waiting.append(child)
    return False
