"""Find activations that are functions, such as `torch.relu(x)`, on the tape of a forward pass, before a backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gradwatch.probe.activation_rules import Rules, rules_of
from gradwatch.probe.graph import LAYOUT, LEAF, Node, operation
from gradwatch.probe.layout import Models, named_modules
from gradwatch.probe.loss_rules import LINEAR

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
    """Whose output an activation is of: the name of a module, its place in the model, and itself."""

    name: str
    place: int
    module: nn.Module


class Seen(NamedTuple):
    """One call of a function: name and place of the matrix behind whose output it comes, and what it gave."""

    name: str
    place: int
    channels_first: bool | None
    function: Function
    output: Tensor


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
        self._ways: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # to the parameter of each activation of a step
        for place, (name, module) in enumerate(named_modules(models)):
            owner = name.partition(".parametrizations.")[0].removesuffix(".parametrizations")
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, Owner(owner, place, module))

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
        tape = _Tape(_Names(), _MadeOf())
        for node, users in _activations(tape, roots, self._met):
            owner = None if node in known or len(calls) == MOST_FUNCTIONS else self._owner(tape, node)
            function = _function(tape.names[node], node, users) if owner else None
            if not owner or not function or isinstance(owner.module, RECURRENT):
                continue
            name = f"{owner.name}.{function.kind.lower()}" if owner.name else function.kind.lower()
            calls[name] = calls.get(name, 0) + 1
            output = _output(node, function) if calls[name] <= MOST_CALLS else None
            if output is not None and output.numel():
                yield Seen(name, owner.place, _is_channels_first(owner.module), function, output)

    def _owner(self, tape: _Tape, node: Node) -> Owner | None:
        """Return the module of the nearest matrix, or else of the nearest parameter, that an activation is made of.

        It is mostly where it was in the steps before, and then need not be searched for.
        """
        place = self._num_met
        self._num_met += 1
        way, param = self._ways.get(place, ((), None))
        if param is None or _end(tape, node, way) is not param:
            way, param = self._search(tape, node)
            if param is None:
                return None
            if place < MOST_NODES:
                self._ways[place] = way, param
        return self._owners[param]

    def _search(self, tape: _Tape, node: Node) -> tuple[tuple[int, ...], Tensor | None]:
        """Return that parameter, and the way to it: which of the arguments, from operation to operation."""
        ways = {node: tuple[int, ...]()}
        waiting = deque([node])
        nearest: tuple[tuple[int, ...], Tensor | None] = (), None
        while waiting and len(ways) < NEAR:
            at = waiting.popleft()
            if tape.names[at] == LEAF:
                if at.variable in self._owners:
                    nearest = nearest if nearest[1] is not None else (ways[at], at.variable)
                    if at.variable.ndim > 1:
                        return ways[at], at.variable
                continue
            for i, child in enumerate(tape.made_of[at]):
                if child not in ways:
                    ways[child] = *ways[at], i
                    waiting.append(child)
        return nearest


@final
class _Names(dict[Node, str]):
    """What nodes compute; each is asked once."""

    def __missing__(self, node: Node) -> str:
        name = self[node] = operation(node)
        return name


@final
class _MadeOf(dict[Node, list[Node]]):
    """What the arguments of operations came from, without constants; each is asked once."""

    def __missing__(self, node: Node) -> list[Node]:
        children = self[node] = [child for child, _ in node.next_functions if child is not None]
        return children


class _Tape(NamedTuple):
    """What one look has seen of a graph. It holds the nodes, and so must not outlive the look."""

    names: _Names
    made_of: _MadeOf


def _activations(tape: _Tape, roots: Sequence[Node], met: set[int]) -> Iterator[tuple[Node, set[str]]]:
    """Yield the activations behind some nodes that are hidden or follow a matrix, with the names of what uses them.

    Args:
        tape: What was seen so far.
        roots: Where to begin.
        met: Where to end: sequence numbers of nodes that were hidden behind earlier roots. Those of these are added.
    """
    outer, users = _walk(tape, roots, stop=True)
    behind = [child for node in outer if _is_product(tape, node) for child in tape.made_of[node]]
    new = [node for node in behind if tape.names[node] != LEAF and node._sequence_nr() not in met]
    inner, users_inside = _walk(tape, new, stop=False, met=met)
    met.update(node._sequence_nr() for node in inner)
    for node in inner:
        if tape.names[node] in OPERATIONS:
            yield node, users_inside.get(node, set()) | users.get(node, set())
    inside = set(inner)
    for node in outer:
        if tape.names[node] in OPERATIONS and node not in inside and _follows_a_matrix(tape, node):
            yield node, users.get(node, set())


def _walk(
    tape: _Tape, roots: Sequence[Node], *, stop: bool, met: AbstractSet[int] = frozenset()
) -> tuple[list[Node], dict[Node, set[str]]]:
    """Return nodes but leaves in the order of their distance, and the names of the operations that use each activation.

    Args:
        tape: What was seen so far.
        roots: Where to begin.
        stop: Whether to go no further than to products with a matrix.
        met: Sequence numbers of nodes not to go to.
    """
    names, made_of = tape
    nodes: list[Node] = []
    users: dict[Node, set[str]] = {}
    waiting, seen = deque(dict.fromkeys(roots)), set(roots)
    while waiting and len(nodes) < MOST_NODES:
        node = waiting.popleft()
        nodes.append(node)
        if stop and _is_product(tape, node):
            continue
        name, children = names[node], made_of[node]
        for child in children:
            if (kind := names[child]) == LEAF:
                continue
            if kind in OPERATIONS:
                users.setdefault(child, set()).add(PRODUCT if name == "Mul" and len(children) > 1 else name)
            if child not in seen and not (met and child._sequence_nr() in met):
                seen.add(child)
                waiting.append(child)
    return nodes, users


def _end(tape: _Tape, node: Node, way: Sequence[int]) -> Tensor | None:
    """Return the parameter at the end of a way, None where it does not lead to one."""
    for place in way:
        made_of = tape.made_of[node]
        if place >= len(made_of):
            return None
        node = made_of[place]
    param: Tensor | None = node.variable if tape.names[node] == LEAF else None
    return param


def _follows_a_matrix(tape: _Tape, node: Node) -> bool:
    """Say whether an activation is that of a matrix product, with nothing but changes of layout in between."""
    made_of = tape.made_of[node]
    return len(made_of) == 1 and _is_product(tape, _through(tape, made_of[0]))


def _is_product(tape: _Tape, node: Node) -> bool:
    """Say whether a node multiplies by a matrix: by any, or, of stacks, by a parameter."""
    name = tape.names[node]
    if name not in BATCHED:
        return name in LINEAR
    factors = [factor for factor, _ in node.next_functions[-2:] if factor is not None]
    return any(tape.names[_through(tape, factor)] == LEAF for factor in factors)


def _through(tape: _Tape, node: Node) -> Node:
    """Return the operation that made the values, behind those that only move them about."""
    while tape.names[node] in LAYOUT and len(made_of := tape.made_of[node]) == 1:
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
        kept: Tensor = getattr(node, f"_saved_{name}").detach()
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


def tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors of what a forward pass returned."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part, depth - 1)
    elif depth and isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part, depth - 1)
    elif depth and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name, None), depth - 1)
