"""Find parameters that nobody was told of: in a plain list, as a plain tensor, or in no group of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.probe.device.dtensor import has_values
from gradwatch.probe.graph.graph import LEAF, Graph, Node, is_leaf, operation
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.updates.outside_moves import fingerprints

LATER = 8
"""Step of the second look: whoever trains such a layer elsewhere has moved it by then."""

REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module by which it knows what it holds."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


@final
class Strays:
    """Compares the parameters that losses reach with those that `parameters()` gives, in two looks.

    A module or parameter assigned to an attribute is registered; in a list, tuple or dict it is not, nor is a tensor
    that merely requires a gradient, nor what was computed from a parameter, and the optimizer that is given
    `model.parameters()` never sees it. Parameters of other models (a critic, a teacher) are on the tape too: only those
    that an attribute of this one holds count, and of them those that nothing has moved between the looks: their version
    counter, which each update in place raises, and their sum are the same. A tensor that goes into a layer as its
    input, as points at which a solution is differentiated do, is no parameter.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: list[tuple[weakref.ref[Tensor], tuple[int, bytes]]] = []

    def facts(self, graph: Graph, known: Mapping[Tensor, int], *, step: int) -> Iterator[Fact]:
        """Yield each attribute with parameters that were on the tape at the first look and have not moved since.

        Args:
            graph: Tape of the step's loss.
            known: The parameters of the model.
            step: Optimizer step.
        """
        leaves = [node for node in graph.of(LEAF) if node.variable not in known]
        strays = [node.variable for node in leaves if not _is_input(graph, node, known) and has_values(node.variable)]
        if step < LATER:
            self._seen = self._seen or [(weakref.ref(stray), _state(stray)) for stray in strays]
            return
        before = {id(param): state for ref, state in self._seen if (param := ref()) is not None}
        still = {id(stray) for stray in strays if id(stray) in before and before[id(stray)] == _state(stray)}
        for name, params, what in self._attributes() if still else ():
            number = sum(id(param) in still for param in params)
            if number:
                text = f"the loss reaches {number} tensors in `{name}`, {what}"
                yield "parameters-unregistered", name, text, {"tensors": float(number)}

    def _attributes(self) -> Iterator[tuple[str, list[Tensor], str]]:
        """Yield what modules and their attributes hold, with the full name, and why nobody was told of it."""
        for module_name, module in named_modules(self._models):
            yield module_name, list(module.parameters(recurse=False)), "which was made after the optimizer"
            for name, value in vars(module).items():
                if name in REGISTERED or not isinstance(value, (list, tuple, dict, Tensor)):
                    continue
                what = "tensor" if isinstance(value, Tensor) else "container"
                if params := list(_parameters(value)):
                    full_name = f"{module_name}.{name}" if module_name else name
                    yield full_name, params, f"a plain {what} that parameters() does not see"


def empty_groups(optimizers: Sequence[Optimizer]) -> Iterator[Fact]:
    """Yield the first group that holds no parameter, as one that was made of a generator which was used up."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    empty = [i for i, group in enumerate(groups) if not group["params"]]
    if empty:
        yield "group-empty", None, f"group {empty[0]} of the optimizer holds no parameter", {"group": float(empty[0])}


def _parameters(value: Any, *, depth: int = 2) -> Iterator[Tensor]:
    """Yield the parameters in a container, and in containers in it, and those that a tensor was computed from."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Tensor) and value.requires_grad:
        yield from [value] if value.grad_fn is None else [n.variable for n in Graph(value).nodes if is_leaf(n)]
    elif depth and isinstance(value, (Sequence, Mapping)) and not isinstance(value, str):
        members = value.values() if isinstance(value, Mapping) else value
        for member in members:
            yield from _parameters(member, depth=depth - 1)


def _state(param: Tensor) -> tuple[int, bytes]:
    """Return what changes when a parameter is moved, in place or through its data."""
    return param._version, fingerprints([param])[0]


def _is_input(graph: Graph, leaf: Node, known: Mapping[Tensor, int]) -> bool:
    """Say whether a leaf goes, by itself, into an operation with a parameter of the model: as the input of a layer."""
    users = graph.users(leaf)
    seen = {leaf}
    while users:
        user = users.pop()
        if user in seen:
            continue
        seen.add(user)
        others = [child for child in graph.inputs(user) if child not in seen]
        if any(_is_known(graph, child, known) for child in others):
            return True
        if not others or operation(user) == "Cat":
            users += graph.users(user)
    return False


def _is_known(graph: Graph, node: Node, known: Mapping[Tensor, int]) -> bool:
    made_by = graph.through(node)
    return made_by is not None and is_leaf(made_by) and made_by.variable in known
