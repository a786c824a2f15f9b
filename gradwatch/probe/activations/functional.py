"""Find functional activations, such as `torch.relu(x)`, in the autograd graph of a forward pass before a backward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gradwatch.probe.activations.attention import COMPOSED, read_attention
from gradwatch.probe.activations.routing import Router, count_tokens, find_router, is_sample
from gradwatch.probe.activations.rules import ActivationRules, rules_of
from gradwatch.probe.graph.graph import (
    FUSED_ATTENTIONS,
    LEAF,
    LINEAR,
    NAMES,
    SOFTMAX,
    Node,
    arguments,
    is_product,
    operation,
    signed,
    through,
)
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.saved_hooks import count_uses, saved_tensor

MAX_NODES = 1_200
"""Maximum number of nodes to visit in one forward pass, not counting parameters, nearest to the output first: 4 ms."""

MAX_ACTIVATIONS = 256
"""Maximum number of activations to read in one forward pass."""

MAX_CALLS = 4
"""Maximum number of calls of one activation to read in a forward pass: a cell runs at each position of a sequence."""

MAX_OWNER_NODES = 64
"""Maximum number of nodes to search for the matrix before an activation: norms, biases and heads lie in between."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules with gates that are closed on purpose at times."""

OPERATIONS = {
    *FUSED_ATTENTIONS,
    "Clamp",
    "Hardsigmoid",
    "Hardtanh",
    "Relu",
    COMPOSED,
    "Sigmoid",
    "Softmax",
    "Tanh",
    "Threshold",
}
"""Activations that detectors judge; all others have a slope everywhere."""

PRODUCT = "a product of two values"
"""Marks a use as a gate. A product with a constant, such as dropout, does not make a gate."""

WEIGHTING = "Mul"
"""Operation by which the score of an expert weights its output."""

_sequence_nr = methodcaller("_sequence_nr")


@final
@dataclass(frozen=True, slots=True)
class FunctionType:
    """The activation that an operation computes.

    Args:
        kind: Name of the equivalent module type; `Gate` for a sigmoid or tanh that multiplies; `SoftmaxSample` for
            `gumbel_softmax`; `Attention` for `scaled_dot_product_attention`; `Routing` for the choice of a router
            among experts.
        rules: Ranges of dead and saturated outputs.
        module: The equivalent module, if the operation saves its input; None if it saves its output.
    """

    kind: str
    rules: ActivationRules
    module: nn.Module | None = None


class OwnerModule(NamedTuple):
    """The module before an activation: name, index in the model, layout of its units, and whether it is recurrent."""

    name: str
    module_index: int
    channels_first: bool | None
    is_recurrent: bool


class Visited(NamedTuple):
    """Sequence numbers of the visited nodes of a step. The nodes themselves would keep the graph alive.

    Args:
        outer: Nodes after the last matrix of an output.
        inner: Nodes before it.
    """

    outer: set[int]
    inner: set[int]


class FunctionCall(NamedTuple):
    """One call of a functional activation: its name, the index of the module before it, and its result.

    Attention in one kernel has a reading of `read_attention` and no output. A softmax of attention has both. Routing
    has the number of tokens of each expert as its output.
    """

    name: str
    module_index: int
    channels_first: bool | None
    function: FunctionType
    output: Tensor | None
    attention: Tensor | None

    @property
    def is_kept(self) -> bool:
        """Return whether the graph has saved the output, so that nothing is computed again."""
        return self.function.module is None


@final
class FunctionalActivations:
    """Read the outputs of functional activations from the autograd graph of a forward pass.

    A backward pass frees the tensors that the graph saves; before it they are in memory. Nothing is unpacked: tensors
    with saved-tensor hooks, as in activation checkpointing and offloading, are ignored. A compiled region is one node
    and shows nothing.

    Two groups of activations are read: hidden ones, between two matrices (a weight in `einsum` counts as one), and
    those right after the last matrix. Activations of a loss that is part of the model are not read. The graph of an
    output is not visited again as part of the graph of the next output.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        self._uses_of_hooks = count_uses()
        self._visited = Visited(set(), set())
        self._owners: dict[Tensor, OwnerModule] = {}
        for index, (name, module) in enumerate(named_modules(models)):
            # a parametrized weight belongs to the layer, not to the helper modules inside it
            name = name.partition(".parametrizations.")[0].removesuffix(".parametrizations")
            owner = OwnerModule(name, index, _is_channels_first(module), isinstance(module, RECURRENT))
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, owner)

    def begin(self) -> None:
        """Prepare for the next step."""
        self._visited = Visited(set(), set())
        self._uses_of_hooks = count_uses()

    def find(self, output: Any, *, known: set[Node]) -> Iterator[FunctionCall]:
        """Yield the calls of functional activations in the graph of an output.

        Args:
            output: Any nest of tensors.
            known: Nodes of activations that are modules.
        """
        roots = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        calls: dict[str, int] = {}
        routers: dict[Node, Router] = {}  # by the choice, which weights every expert
        for node, users in _activations(roots, self._visited):
            if operation(node) == WEIGHTING:
                router = find_router(node)
                if router is not None:
                    routers.setdefault(router.choice, router)
                continue
            # cheapest conditions first: the walk to the owner is the slow part
            owner = None if node in known or len(calls) == MAX_ACTIVATIONS else self._owner(node)
            function = _function(operation(node), node, users) if owner else None
            if not owner or not function or owner.is_recurrent:
                continue
            # a model that is a single layer has no name
            name = f"{owner.name}.{function.kind.lower()}" if owner.name else function.kind.lower()
            calls[name] = calls.get(name, 0) + 1
            if calls[name] > MAX_CALLS:
                continue
            output, attention = self._output(node, function), None
            if function is _ATTENTION or operation(node) in SOFTMAX:
                with torch.no_grad():
                    attention = read_attention(node, self._saved)
            if attention is not None or (output is not None and output.numel()):
                yield FunctionCall(name, owner.module_index, owner.channels_first, function, output, attention)
        yield from self._routings(routers.values())

    def _routings(self, routers: Iterable[Router]) -> Iterator[FunctionCall]:
        for router in routers:
            owner, tokens = self._owner(router.product), count_tokens(router, self._saved)
            if owner is not None and tokens is not None:
                yield FunctionCall(f"{owner.name}.routing", owner.module_index, False, _ROUTING, tokens, None)

    def _output(self, node: Node, function: FunctionType) -> Tensor | None:
        """Return the output of an activation, or None if the output is not in memory unchanged."""
        if function is _ATTENTION:
            return None
        kept = self._saved(node, "result" if function.module is None else "self")
        if kept is None or function.module is None:
            return kept
        with torch.no_grad():
            return Tensor(function.module(kept))

    def _saved(self, node: Node, name: str) -> Tensor | None:
        return saved_tensor(node, name, self._uses_of_hooks)

    def _owner(self, node: Node) -> OwnerModule | None:
        """Return the module of the nearest matrix before an activation, or else of the nearest parameter."""
        waiting, seen = deque([node]), {node}
        nearest: OwnerModule | None = None
        while waiting and len(seen) < MAX_OWNER_NODES:
            at = waiting.popleft()
            if operation(at) == LEAF:
                owner = self._owners.get(at.variable)
                # vectors are biases and norms, which only decide if there is no matrix
                if owner is not None and at.variable.ndim > 1:
                    return owner
                nearest = nearest or owner
                continue
            for child, _ in at.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)
        return nearest


def _activations(roots: Sequence[Node], visited: Visited) -> Iterator[tuple[Node, set[str]]]:
    """Yield the hidden activations below some nodes and those right after a matrix, with the users of each gate.

    Args:
        roots: First nodes.
        visited: Nodes below earlier roots, which are not visited in the same part. New nodes are added.
    """
    # `outer` is the part after the last matrix, where a loss may lie; `inner` is all that comes before
    outer, users = _walk(roots, stop=True, visited=visited.outer)
    visited.outer.update(map(_sequence_nr, outer))
    below = [child for node in outer if is_product(node) for child in arguments(node)]
    new = [node for node in below if operation(node) != LEAF and node._sequence_nr() not in visited.inner]
    inner, users_inside = _walk(new, stop=False, visited=visited.inner)
    visited.inner.update(map(_sequence_nr, inner))
    for node in _of_interest(inner):
        yield node, users_inside.get(node, set()) | users.get(node, set())
    inside = set(inner)
    for node in _of_interest(outer):
        if node not in inside and (operation(node) == WEIGHTING or _follows_a_matrix(node)):
            yield node, users.get(node, set())


def _of_interest(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if (name := operation(node)) in OPERATIONS or name == WEIGHTING]


def _walk(
    roots: Sequence[Node], *, stop: bool, visited: AbstractSet[int] = frozenset()
) -> tuple[list[Node], dict[Node, set[str]]]:
    """Return nodes without leaves, nearest first, and the names of the operations that use each gate.

    Args:
        roots: First nodes.
        stop: Whether to stop at products with a matrix.
        visited: Sequence numbers of nodes not to visit.
    """
    nodes, users = list(dict.fromkeys(roots)), dict[Node, set[str]]()
    seen = set(nodes)
    for node in islice(nodes, MAX_NODES):  # the list is its own queue: it grows during the loop
        if stop and is_product(node):
            continue
        for child, _ in node.next_functions:
            # inlined `operation`: the call would take as long as the rest of the loop
            if child is None or (kind := NAMES.get(type(child)) or operation(child)) == LEAF:
                continue
            if kind in _GATES:
                users.setdefault(child, set()).add(_use(node))
            if child not in seen and not (visited and child._sequence_nr() in visited):
                seen.add(child)
                nodes.append(child)
    return nodes[:MAX_NODES], users


def _use(node: Node) -> str:
    name = operation(node)
    return PRODUCT if name == "Mul" and len(arguments(node)) > 1 else name


def _follows_a_matrix(node: Node) -> bool:
    """Return whether an activation follows a matrix product, with only changes of layout in between."""
    below = arguments(node)
    return len(below) == 1 and is_product(through(below[0]))


def _function(name: str, node: Node, users: set[str]) -> FunctionType | None:
    """Return the activation that a node computes, or None."""
    if name == COMPOSED or name in FUSED_ATTENTIONS:
        return _ATTENTION
    if name == "Softmax":
        module = nn.Softmax(signed(node._saved_dim))
        return _of_module(module, keeps_output=True, kind="SoftmaxSample" if is_sample(node) else None)
    if name in ("Sigmoid", "Tanh"):
        # a value that also enters a matrix is a hidden activation
        is_gate = PRODUCT in users and not users & LINEAR
        return _GATES[name] if is_gate else _FUNCTIONS[name]
    if name == "Threshold" and node._saved_threshold != 0:  # only a threshold of 0 is a ReLU
        return None
    return _FUNCTIONS.get(name) or _bounded(name, node)


def _bounded(name: str, node: Node) -> FunctionType | None:
    """Return the activation that a clamping node computes, or None."""
    low, high = (node._saved_min_val, node._saved_max_val) if name == "Hardtanh" else (node._saved_min, node._saved_max)
    if low is None:  # a bound from above only: the values below it keep their slope
        return None
    if high is None:
        return _of_module(nn.ReLU(), keeps_output=False) if low == 0 else None
    if name == "Hardtanh" and (low, high) == (0, 6):
        return _of_module(nn.ReLU6(), keeps_output=False)
    kind = None if name == "Hardtanh" else "Clamp"
    return _of_module(nn.Hardtanh(float(low), float(high)), keeps_output=False, kind=kind) if low < high else None


def _of_module(module: nn.Module, *, keeps_output: bool, kind: str | None = None) -> FunctionType:
    rules = rules_of(module)
    assert rules is not None, "only activations are passed in"
    return FunctionType(kind or type(module).__name__, rules, None if keeps_output else module)


_FUNCTIONS = {
    "Relu": _of_module(nn.ReLU(), keeps_output=True),
    "Sigmoid": _of_module(nn.Sigmoid(), keeps_output=True),
    "Tanh": _of_module(nn.Tanh(), keeps_output=True),
    "Hardsigmoid": _of_module(nn.Hardsigmoid(), keeps_output=False),
    "Threshold": _of_module(nn.ReLU(), keeps_output=False),
}
"""Activations without settings, by operation. They are shared: making a module takes as long as reading an output."""

_ATTENTION = FunctionType("Attention", ActivationRules())
"""`scaled_dot_product_attention`, in one kernel or composed."""

_ROUTING = FunctionType("Routing", ActivationRules(dead=(-math.inf, 0.0)))
"""The choice of a router among experts. An expert without tokens is a dead unit."""

_GATES = {name: replace(_FUNCTIONS[name], kind="Gate") for name in ("Sigmoid", "Tanh")}
"""Activations that multiply, by operation."""


def _is_channels_first(module: nn.Module) -> bool | None:
    """Return whether units are dimension 1 of a module's output; None if it depends on the number of dimensions."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return True
    return False if isinstance(module, (nn.Linear, nn.Embedding, nn.MultiheadAttention)) else None
