"""Find parameters that are missing from the model or its optimizer, and parameters of another learner."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.events import (
    ADVERSARY,
    EMPTY_GROUP,
    NOTHING_TRAINABLE,
    UNHELD,
    UNREGISTERED,
    Observation,
)
from gradwatch.probe.device.dtensor import has_values, local_part
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.device.torch_reduce import stored_values
from gradwatch.probe.graph.graph import LEAF, Graph, Node, is_leaf, operation
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.updates.outside_moves import fingerprints

MAX_SHAPES = 3
"""Maximum number of shapes in a text."""

SECOND_LOOK_STEP = 8
"""Step of the second comparison: by then, an optimizer elsewhere has moved each parameter that it owns."""

JOINS = frozenset({"Cat", "Stack"})
"""Operations that join tensors without computing new values."""

REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that hold its registered parameters, buffers and submodules."""


@final
class UnregisteredParams:
    """Compare the parameters that losses reach with those that `parameters()` returns, at two steps.

    PyTorch registers a module or parameter that is assigned to an attribute. It does not register one in a list, tuple
    or dict, a plain tensor that requires a gradient, a tensor computed from a parameter, or a parameter that each
    forward pass makes. An optimizer of `model.parameters()` never sees these. The graph also holds parameters of other
    models (a critic, a teacher). So a parameter counts only if an attribute of this model holds it and nothing has
    moved it between the two steps. Then its version counter, which each in-place update raises, and its fingerprint are
    unchanged. A tensor that is the input of a layer, such as points at which a solution is differentiated, is not a
    parameter.

    Args:
        models: A model, or several by name.
        held: `id` of each parameter of the watched optimizers.
    """

    def __init__(self, models: Models, held: Collection[int] = ()) -> None:
        self._models = models
        # weak references: a probe must not keep the tensors of a discarded model alive
        self._seen: list[tuple[weakref.ref[Tensor], tuple[int, bytes]]] = []
        self._gradients: dict[int, tuple[weakref.ref[Tensor], float]] = {}
        self._others: list[
            tuple[weakref.ref[Tensor], torch.Size]
        ] = []  # parameters at the first step, and their shapes
        self._held = held

    def find(self, graph: Graph, known: Mapping[Tensor, int], *, step: int) -> Iterator[Observation]:
        """Yield each attribute with parameters that were in the graph at the first step and have not moved since.

        Args:
            graph: Autograd graph of the step's loss.
            known: The parameters of the model.
            step: Optimizer step.
        """
        leaves = [node for node in graph.of(LEAF) if node.variable not in known]
        # reading a tensor with freed storage would end the process
        nodes = [node for node in leaves if not _is_input(graph, node, known) and has_values(node.variable)]
        found = [node.variable for node in nodes]
        if step < SECOND_LOOK_STEP:
            self._seen = self._seen or [(weakref.ref(param), _state(param)) for param in found]
            others = [param for param in found if isinstance(param, nn.Parameter)]
            self._others = self._others or [(weakref.ref(param), param.shape) for param in others]
            self._gradients = {id(p): (weakref.ref(p.grad), _norm(p.grad)) for p in found if p.grad is not None}
            return
        inside = [node.variable for node in nodes if _is_inside(graph, node, known)]
        yield from self._find_remade(inside, num_known=len(graph.of(LEAF)) - len(leaves))
        # by `id`, since a tensor compares elementwise; the weak reference shows that the object is still the same
        before = {id(param): state for ref, state in self._seen if (param := ref()) is not None}
        unmoved = {id(param) for param in found if id(param) in before and before[id(param)] == _state(param)}
        for name, params, reason in self._attributes() if unmoved else ():
            mine = {id(param) for param in params} & unmoved
            if mine:
                what = f"{len(mine)} tensors in `{name}`"
                yield UNREGISTERED.observe(name, values={"tensors": len(mine)}, what=what, reason=reason)
            unmoved -= mine
        # the gradient of another learner's parameter is cleared by its optimizer: here each backward pass adds to it
        kept = [p for p in found if id(p) in unmoved and id(p) not in self._held and self._adds_up(p)]
        if kept:
            shapes = ", ".join(sorted({str(tuple(param.shape)) for param in kept})[:MAX_SHAPES])
            what = f"{len(kept)} tensor{'s' if len(kept) > 1 else ''} of shape {shapes}"
            yield UNHELD.observe(values={"tensors": len(kept)}, what=what)

    def _find_remade(self, found: Sequence[Tensor], *, num_known: int) -> Iterator[Observation]:
        """Yield an observation if a forward pass makes parameters that the next one makes again.

        Args:
            found: Parameters that the model does not have, and that lie before some of its own.
            num_known: Number of parameters in the graph that the model has. If `found` has more, the loss is that of a
                copy.
        """
        used = set(map(id, found))
        before = {id(param) for ref, _ in self._others if (param := ref()) is not None}
        gone = {shape for ref, shape in self._others if (param := ref()) is None or id(param) not in used}
        new = [param for param in found if isinstance(param, nn.Parameter) and id(param) not in before]
        made = [param for param in new if param.shape in gone and id(param) not in self._held]
        if 0 < len(made) <= num_known:
            what = f"a parameter of shape {tuple(made[0].shape)}"
            reason = "which each forward pass makes again"
            yield UNREGISTERED.observe(values={"tensors": len(made)}, what=what, reason=reason)

    def _adds_up(self, param: Tensor) -> bool:
        """Return whether the gradient of a parameter is the object of an earlier step, and has grown."""
        grad, (before, norm) = param.grad, self._gradients.get(id(param), (None, 0.0))
        return grad is not None and before is not None and before() is grad and _norm(grad) > norm

    def _attributes(self) -> Iterator[tuple[str, list[Tensor], str]]:
        """Yield the parameters of modules and of their attributes, with the full name and the reason of the mistake."""
        for module_name, module in named_modules(self._models):
            # registered now, but unknown at the start: a layer that the first forward pass made
            yield module_name, list(module.parameters(recurse=False)), "which was created after the optimizer"
            for name, value in vars(module).items():
                if name in REGISTERED or not isinstance(value, (list, tuple, dict, Tensor)):
                    continue
                kind = "tensor" if isinstance(value, Tensor) else "container"
                if params := list(_parameters(value)):
                    full_name = f"{module_name}.{name}" if module_name else name
                    yield full_name, params, f"a plain {kind} that parameters() does not include"


def find_nothing_to_train(params: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> Iterator[Observation]:
    """Yield an observation if no parameter requires a gradient, or if an optimizer holds no parameter."""
    if params and not any(param.requires_grad for param in params):
        yield NOTHING_TRAINABLE.observe(reason="no parameter of the model requires a gradient, so nothing is trained")
        return
    empty = [optimizer for optimizer in optimizers if not any(group["params"] for group in optimizer.param_groups)]
    if empty:
        reason = f"the optimizer {type(empty[0]).__name__} holds no parameter, so it updates nothing"
        yield NOTHING_TRAINABLE.observe(reason=reason)


def find_empty_groups(optimizers: Sequence[Optimizer]) -> Iterator[Observation]:
    """Yield the first group without parameters, such as a group made from an exhausted generator."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    empty = [i for i, group in enumerate(groups) if not group["params"]]
    if empty:
        yield EMPTY_GROUP.observe(values={"group": empty[0]})


def find_adversary(graph: Graph, index: Mapping[Tensor, int], held: Collection[int]) -> Iterator[Observation]:
    """Yield an observation if parameters of another learner, such as a GAN's critic, lie between model and loss.

    Another optimizer moves them, so a loss that does not fall says nothing about the model alone. Encoders before the
    model do not count.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        held: `id` of each parameter of the watched optimizers.
    """
    for node in graph.nodes:
        others = [leaf for leaf in graph.inputs(node) if is_leaf(leaf) and _is_foreign(leaf.variable, index, held)]
        # the model lies below the operation, so the other learner judges the model's output
        if others and any(is_leaf(leaf) and leaf.variable in index for leaf in graph.below(node)):
            yield ADVERSARY.observe()
            return


def _is_foreign(leaf: Tensor, index: Mapping[Tensor, int], held: Collection[int]) -> bool:
    return isinstance(leaf, nn.Parameter) and leaf not in index and id(leaf) not in held


def _parameters(value: Any, *, depth: int = 2) -> Iterator[Tensor]:
    """Yield the parameters in a container and in nested containers, and the parameters that a tensor depends on."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Tensor) and value.requires_grad:
        yield from [value] if value.grad_fn is None else [n.variable for n in Graph(value).nodes if is_leaf(n)]
    elif depth and isinstance(value, (Sequence, Mapping)) and not isinstance(value, str):
        members = value.values() if isinstance(value, Mapping) else value
        for member in members:
            yield from _parameters(member, depth=depth - 1)


def _norm(grad: Tensor) -> float:
    return to_float(torch.linalg.vector_norm(stored_values(local_part(grad).detach()).float()))


def _state(param: Tensor) -> tuple[int, bytes]:
    # an update in place raises the version; one through `.data` only changes the fingerprint
    return param._version, fingerprints([param])[0]


def _is_inside(graph: Graph, leaf: Node, known: Mapping[Tensor, int]) -> bool:
    """Return whether parameters of the model come after a leaf. They do not for a factor of its outputs."""
    above = graph.above(leaf)
    return any(_is_known(graph, child, known) for node in above for child in graph.inputs(node))


def _is_input(graph: Graph, leaf: Node, known: Mapping[Tensor, int]) -> bool:
    """Return whether an operation combines a leaf with a parameter of the model, as a layer does with its input."""
    waiting, seen, alone = graph.users(leaf), set[Node](), {leaf}
    while waiting:
        user = waiting.pop()
        if user in seen:
            continue
        seen.add(user)
        others = [child for child in graph.inputs(user) if not _is_made_of(graph, child, alone)]
        if any(_is_known(graph, child, known) for child in others):
            return True
        # only through operations on the leaf alone, and joins: coordinates are often joined
        if not others or operation(user) in JOINS:
            waiting += graph.users(user)
    return False


def _is_made_of(graph: Graph, node: Node, alone: set[Node]) -> bool:
    """Return whether a value depends on one leaf alone, as the samples of a batch that is stacked do.

    Args:
        graph: Autograd graph.
        node: Node of the value.
        alone: Nodes that depend on the leaf alone. Those below the value are added if it does, too.
    """
    waiting, new = [node], set[Node]()
    while waiting:
        below = waiting.pop()
        if below in alone or below in new:
            continue
        if is_leaf(below):
            return False
        new.add(below)
        waiting += graph.inputs(below)
    alone |= new
    return True


def _is_known(graph: Graph, node: Node, known: Mapping[Tensor, int]) -> bool:
    made_by = graph.through(node)
    return made_by is not None and is_leaf(made_by) and made_by.variable in known
