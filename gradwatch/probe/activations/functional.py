"""Find activations that are functions, such as `torch.relu(x)`, on the tape of a forward pass, before a backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gradwatch.probe.activations.rules import Rules, rules_of
from gradwatch.probe.graph.graph import LAYOUT, LEAF, NAMES, Node, operation
from gradwatch.probe.graph.loss_rules import LINEAR
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.parameters import Models, named_modules

MOST_NODES = 1_200
"""Nodes of one forward pass, parameters aside, that are looked at, the nearest to its output first: 4 ms."""

MOST_FUNCTIONS = 256
"""Activations of one forward pass that are read."""

MOST_CALLS = 4
"""Calls of one of them within a forward pass that are read: a cell is called as often as a sequence is long."""

NEAR = 64
"""Nodes within which the matrix lies whose units an activation is of: norms, biases, heads come in between."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose gates are meant to be shut now and then."""

BATCHED = frozenset({"Bmm", "Baddbmm"})
"""Products of stacks of matrices: what `einsum` makes of a product with a weight, and attention of queries and keys."""

OPERATIONS = frozenset({"Clamp", "Hardsigmoid", "Hardtanh", "Relu", "Sigmoid", "Softmax", "Tanh", "Threshold"})
"""What detectors judge; others have a slope everywhere."""

PRODUCT = "a product of two values"
"""What uses a gate: a product with a constant, as dropout is, does not make one."""

_sequence_nr = methodcaller("_sequence_nr")

_HOOKED: Callable[..., Any] = lambda saved: saved  # noqa: E731 - stands for a hook where torch does not tell of any


@final
@dataclass(frozen=True, slots=True)
class Function:
    """What an operation computes.

    Args:
        kind: Name of the module type that does the same; `Gate` for a sigmoid or tanh that multiplies.
        rules: What to look for in it.
        module: That module, where the operation keeps its input; None where it keeps its output.
    """

    kind: str
    rules: Rules
    module: nn.Module | None = None


class Owner(NamedTuple):
    """Whose output an activation is of: the name of a module, its place in the model, and what it says of its units."""

    name: str
    place: int
    channels_first: bool | None
    is_recurrent: bool


class Way(NamedTuple):
    """Which argument leads on, from operation to operation, to a parameter; and whose that is."""

    places: tuple[int, ...]
    param: Tensor
    owner: Owner


class Seen(NamedTuple):
    """One call of a function: name and place of the matrix behind whose output it comes, and what it gave."""

    name: str
    place: int
    channels_first: bool | None
    function: Function
    output: Tensor

    @property
    def is_kept(self) -> bool:
        """Whether the output lies in the graph, rather than having been computed again."""
        return self.function.module is None


@final
class Functions:
    """Reads what functions give off the graph that a forward pass has left behind.

    A backward frees what the graph keeps; before it, reading is looking at memory that is there. Nothing is computed
    again: what hooks on saved tensors hold, as activation checkpointing and offloading do, is left alone. Compiled
    regions are one node, and show nothing.

    Hidden activations count, with a matrix on both their sides (a weight that `einsum` multiplies by is one), and those
    right behind the last one: what a loss that is part of the model computes does not. What lies behind one output is
    not walked through again behind the next.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        self._met: set[int] = set()  # sequence numbers of nodes of this step: the nodes themselves would hold the graph
        self._num_met = 0  # activations of this step so far
        self._owners: dict[Tensor, Owner] = {}
        self._ways: dict[int, Way] = {}  # to the parameter of each activation of a step
        for place, (name, module) in enumerate(named_modules(models)):
            name = name.partition(".parametrizations.")[0].removesuffix(".parametrizations")
            owner = Owner(name, place, _is_channels_first(module), isinstance(module, RECURRENT))
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, owner)

    def begin(self) -> None:
        """Make ready for the next step."""
        self._met.clear()
        self._num_met = 0

    def look(self, output: Any, *, known: set[Node]) -> Iterator[Seen]:
        """Yield the calls of functions that led to the output of a forward pass.

        Args:
            output: Any nest of tensors.
            known: Nodes of activations that were seen as modules.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform: these are no plain tensors
            return
        roots = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        calls: dict[str, int] = {}
        for node, users in _activations(roots, self._met):
            owner = None if node in known or len(calls) == MOST_FUNCTIONS else self._owner(node)
            function = _function(operation(node), node, users) if owner else None
            if not owner or not function or owner.is_recurrent:
                continue
            name = f"{owner.name}.{function.kind.lower()}" if owner.name else function.kind.lower()
            calls[name] = calls.get(name, 0) + 1
            output = _output(node, function) if calls[name] <= MOST_CALLS else None
            if output is not None and output.numel():
                yield Seen(name, owner.place, owner.channels_first, function, output)

    def _owner(self, node: Node) -> Owner | None:
        """Return the module of the nearest matrix, or else of the nearest parameter, that an activation is made of.

        It is mostly where it was in the steps before, and then need not be searched for.
        """
        place = self._num_met
        self._num_met += 1
        way = self._ways.get(place)
        if way is None or _end(node, way.places) is not way.param:
            way = self._search(node)
            if way is None:
                return None
            if place < MOST_NODES:
                self._ways[place] = way
        return way.owner

    def _search(self, node: Node) -> Way | None:
        """Return the way to that parameter."""
        ways = {node: tuple[int, ...]()}
        waiting = deque([node])
        nearest: Way | None = None
        while waiting and len(ways) < NEAR:
            at = waiting.popleft()
            if operation(at) == LEAF:
                if at.variable in self._owners:
                    found = Way(ways[at], at.variable, self._owners[at.variable])
                    nearest = nearest or found
                    if at.variable.ndim > 1:
                        return found
                continue
            for i, (child, _) in enumerate(at.next_functions):
                if child is not None and child not in ways:
                    ways[child] = *ways[at], i
                    waiting.append(child)
        return nearest


def _activations(roots: Sequence[Node], met: set[int]) -> Iterator[tuple[Node, set[str]]]:
    """Yield activations behind some nodes that are hidden or follow a matrix; of gates, the names of what uses them.

    Args:
        roots: Where to begin.
        met: Where to end: sequence numbers of nodes that were hidden behind earlier roots. Those of these are added.
    """
    outer, users = _walk(roots, stop=True)
    behind = [child for node in outer if _is_product(node) for child in _made_of(node)]
    new = [node for node in behind if operation(node) != LEAF and node._sequence_nr() not in met]
    inner, users_inside = _walk(new, stop=False, met=met)
    met.update(map(_sequence_nr, inner))
    for node in _of_interest(inner):
        yield node, users_inside.get(node, set()) | users.get(node, set())
    inside = set(inner)
    for node in _of_interest(outer):
        if node not in inside and _follows_a_matrix(node):
            yield node, users.get(node, set())


def _of_interest(nodes: Iterable[Node]) -> list[Node]:
    """Return the activations among some nodes."""
    return [node for node in nodes if (NAMES.get(type(node)) or operation(node)) in OPERATIONS]


def _walk(
    roots: Sequence[Node], *, stop: bool, met: AbstractSet[int] = frozenset()
) -> tuple[list[Node], dict[Node, set[str]]]:
    """Return nodes but leaves in the order of their distance, and the names of the operations that use each gate.

    Args:
        roots: Where to begin.
        stop: Whether to go no further than to products with a matrix.
        met: Sequence numbers of nodes not to go to.
    """
    nodes, users = list(dict.fromkeys(roots)), dict[Node, set[str]]()
    seen = set(nodes)
    for node in islice(nodes, MOST_NODES):  # which grow meanwhile
        if stop and _is_product(node):
            continue
        for child, _ in node.next_functions:
            # not by a call of `operation`, which would take as long as all else here
            if child is None or (kind := NAMES.get(type(child)) or operation(child)) == LEAF:
                continue
            if kind in _GATES:
                users.setdefault(child, set()).add(_use(node))
            if child not in seen and not (met and child._sequence_nr() in met):
                seen.add(child)
                nodes.append(child)
    return nodes[:MOST_NODES], users


def _use(node: Node) -> str:
    """Return what an operation does with a value."""
    name = operation(node)
    return PRODUCT if name == "Mul" and len(_made_of(node)) > 1 else name


def _made_of(node: Node) -> list[Node]:
    """Return what the arguments of an operation came from, without constants."""
    return [child for child, _ in node.next_functions if child is not None]


def _end(node: Node, way: Sequence[int]) -> Tensor | None:
    """Return the parameter at the end of a way, None where it does not lead to one."""
    for place in way:
        arguments = node.next_functions
        node = arguments[place][0] if place < len(arguments) else None
        if node is None:
            return None
    param: Tensor | None = node.variable if operation(node) == LEAF else None
    return param


def _follows_a_matrix(node: Node) -> bool:
    """Say whether an activation is that of a matrix product, with nothing but changes of layout in between."""
    made_of = _made_of(node)
    return len(made_of) == 1 and _is_product(_through(made_of[0]))


def _is_product(node: Node) -> bool:
    """Say whether a node multiplies by a matrix: by any, or, of stacks, by a parameter."""
    name = operation(node)
    if name not in BATCHED:
        return name in LINEAR
    factors = [factor for factor, _ in node.next_functions[-2:] if factor is not None]
    return any(operation(_through(factor)) == LEAF for factor in factors)


def _through(node: Node) -> Node:
    """Return the operation that made the values, behind those that only move them about."""
    while operation(node) in LAYOUT and len(made_of := _made_of(node)) == 1:
        node = made_of[0]
    return node


def _function(name: str, node: Node, users: set[str]) -> Function | None:
    """Return what a node of some name computes, or None where that is no activation."""
    if name == "Softmax":
        dim = int(node._saved_dim)
        return _of_module(nn.Softmax(dim if dim < 1 << 63 else dim - (1 << 64)), keeps_output=True)
    if name in ("Sigmoid", "Tanh"):
        is_gate = PRODUCT in users and not users & LINEAR
        return _GATES[name] if is_gate else _FUNCTIONS[name]
    if name == "Threshold" and node._saved_threshold != 0:
        return None
    return _FUNCTIONS.get(name) or _bounded(name, node)


def _bounded(name: str, node: Node) -> Function | None:
    """Return what a node computes that cuts values off."""
    low, high = (node._saved_min_val, node._saved_max_val) if name == "Hardtanh" else (node._saved_min, node._saved_max)
    if low is None:
        return None
    if high is None:
        return _of_module(nn.ReLU(), keeps_output=False) if low == 0 else None
    if name == "Hardtanh" and (low, high) == (0, 6):
        return _of_module(nn.ReLU6(), keeps_output=False)
    kind = None if name == "Hardtanh" else "Clamp"
    return _of_module(nn.Hardtanh(float(low), float(high)), keeps_output=False, kind=kind) if low < high else None


def _of_module(module: nn.Module, *, keeps_output: bool, kind: str | None = None) -> Function:
    rules = rules_of(module)
    assert rules is not None, "these are all activations"
    return Function(kind or type(module).__name__, rules, None if keeps_output else module)


_FUNCTIONS = {
    "Relu": _of_module(nn.ReLU(), keeps_output=True),
    "Sigmoid": _of_module(nn.Sigmoid(), keeps_output=True),
    "Tanh": _of_module(nn.Tanh(), keeps_output=True),
    "Hardsigmoid": _of_module(nn.Hardsigmoid(), keeps_output=False),
    "Threshold": _of_module(nn.ReLU(), keeps_output=False),
}
"""What operations without settings compute, by their name: to make a module takes as long as to read what it gave."""

_GATES = {name: replace(_FUNCTIONS[name], kind="Gate") for name in ("Sigmoid", "Tanh")}
"""The same where they multiply."""


def _output(node: Node, function: Function) -> Tensor | None:
    """Return what an activation gave, or None where that is not there as it was."""
    name = "result" if function.module is None else "self"
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", _HOOKED) is not None:
        return None
    try:
        kept: Tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed by a backward, or written over since
        return None
    if function.module is None:
        return kept
    with torch.no_grad():
        return Tensor(function.module(kept))


def _is_channels_first(module: nn.Module) -> bool | None:
    """Say where the units of a matrix' output lie; None where only the number of dimensions tells."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return True
    return False if isinstance(module, (nn.Linear, nn.Embedding, nn.MultiheadAttention)) else None
