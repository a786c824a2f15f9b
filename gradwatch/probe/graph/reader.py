"""Read the tape of a loss, the autograd graph, at the first steps: what its formulas and its wiring say of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.probe.device.dtensor import gathers
from gradwatch.probe.graph import (
    codebooks,
    cross_entropy,
    embeddings,
    hidden,
    opponents,
    output_heads,
    siblings,
    weight_means,
)
from gradwatch.probe.graph.graph import Graph, Node, operation, shape
from gradwatch.probe.graph.loss_rules import RULES, Fact, divergence
from gradwatch.probe.graph.singularities import suspects
from gradwatch.probe.graph.softmax_axis import mixed
from gradwatch.probe.graph.unregistered import Strays
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import Event, LayerInfo

LOOKS = frozenset({0, 1, 8})
"""Steps at which the tape is read: the first, the one after it for loops that alternate, and one that is warm."""

AUTOPSIES = 3
"""Further looks, at the first steps whose loss or gradients are not finite."""

MOST_SUSPECTS = 3
MOST_CUTS = 8
MOST_PLACES = 8
"""Events of one look at most: beyond them nobody reads."""

LAST_ACTIVATIONS = (nn.Softmax, nn.Softmax2d, nn.Sigmoid, nn.Hardsigmoid)
OPAQUE = frozenset({"CheckpointFunction", "CompiledFunction"})
"""Nodes that hide what they compute, parameters of the model among it."""

REDUCTIONS = frozenset({"Add", "Div", "Mean", "Mul", "Sum", "ToCopy"})
"""Operations that make a number of the terms of a loss, or a weighted sum of several."""

LOSS_SIDE = frozenset(
    {
        "Abs",
        "Add",
        "Div",
        "Expand",
        "HuberLoss",
        "Mean",
        "MseLoss",
        "Mul",
        "Neg",
        "Pow",
        "SmoothL1Loss",
        "Sqrt",
        "Sum",
        "ToCopy",
    }
)
"""Operations between a loss and the difference of prediction and target."""


@final
class Tape:
    """Reads the tape of losses while their steps are the first ones; then it costs a comparison per step.

    Only names, shapes and edges of nodes are read, never a tensor that the graph keeps: nothing is computed, waited
    for, held or freed. A backward pass frees those tensors, so that their values are gone by then in any case.

    What happens inside of a compiled graph is not on the tape, nor inside of reentrant activation checkpointing; a
    loss that is a plain number has none. Under FSDP the leaves of the tape are whole parameters that were gathered for
    the pass and are freed: nothing is said of leaves that are no parameters of the model.

    Args:
        models: A model, or several by name.
        params: Its parameters, in the order of `layers`.
        layers: What they are.
        optimizers: The optimizers that are watched.
        said: Kind and layer of what was said before.

    Attributes:
        has_read: Whether there ever was a tape to read.
    """

    def __init__(
        self,
        models: Models,
        params: Sequence[Tensor],
        layers: Sequence[LayerInfo],
        *,
        optimizers: Sequence[Optimizer] = (),
        said: Iterable[Said] = (),
    ) -> None:
        self._layers = layers
        self._index = {param: i for i, param in enumerate(params)}
        self._last_activation = _last_activations(models)
        self._strays = Strays(models)
        self._is_gathered = any(gathers(module) for _, module in named_modules(models))
        self._held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._autopsies = 0
        self.has_read = False
        self._said = set(said)

    def read(self, loss: Any, *, step: int, is_spoilt: bool = False, is_whole: bool = True) -> list[Event]:
        """Return what the tape of a loss says that was not said before.

        Args:
            loss: Loss of the step, before or after its backward pass.
            step: Optimizer step.
            is_spoilt: Whether the loss or a gradient is not finite.
            is_whole: Whether that is all of the loss, so that what it does not reach is cut off.
        """
        wants_autopsy = is_spoilt and self._autopsies < AUTOPSIES
        if not (is_due(step) or wants_autopsy) or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return []
        graph, self.has_read = Graph(loss), True
        facts = [*self._of_loss(graph), *embeddings.facts(graph, self._index, self._layers)]
        facts += output_heads.facts(graph, self._index, self._layers)
        facts += [*cross_entropy.facts(graph, self._index, self._layers), *cross_entropy.chance(graph)]
        facts += hidden.facts(graph, self._index, self._layers)
        facts += siblings.facts(graph, self._index, self._layers)
        facts += weight_means.matrices(graph, self._index, self._layers)
        facts += codebooks.facts(graph, self._index, self._layers)
        if not self._is_gathered:
            facts += self._unknown(graph, step=step, is_whole=is_whole)
        if wants_autopsy:
            self._autopsies += 1
            facts += self._suspects(graph)
        news: dict[Said, PlacedFact] = {}
        for fact in facts:
            if fact[:2] not in self._said:
                news.setdefault(fact[:2], fact)
        self._said.update(news)
        return [Event(kind=k, step=step, layer=n, text=text, values=values) for k, n, text, values in news.values()]

    def _unknown(self, graph: Graph, *, step: int, is_whole: bool) -> Iterator[PlacedFact]:
        """Yield what leaves that are no parameters of the model say, and parameters that are no leaves."""
        yield from self._strays.facts(graph, self._index, step=step)
        yield from opponents.facts(graph, self._index, self._held)
        yield from self._derivatives(graph)
        if is_whole and graph.is_complete and not graph.of(*OPAQUE):
            yield from self._cuts(graph)

    def _of_loss(self, graph: Graph) -> Iterator[PlacedFact]:
        """Yield what single operations say of the loss."""
        found = [rule(graph, node) for name, rule in RULES.items() for node in graph.of(name)]
        found += [divergence(graph, node) for node in graph.side(REDUCTIONS)]
        found += [_broadcast(graph, node) for node in graph.side(LOSS_SIDE)]
        found += mixed(graph)
        count: Counter[str] = Counter()
        for fact in found:
            if fact is not None and count[fact.kind] < MOST_PLACES:
                count[fact.kind] += 1
                yield fact.kind, self._place(graph, fact.node), fact.text, fact.values

    def _place(self, graph: Graph, node: Node) -> str | None:
        """Return the module that a fact is about: that of the nearest parameter, or the activation right behind it."""
        param = graph.parameter(node)
        i = self._index.get(param) if param is not None else None
        if i is None:
            return None
        layer = self._layers[i]
        name = layer.module or layer.name
        return self._last_activation.get(name, name)

    def _suspects(self, graph: Graph) -> Iterator[PlacedFact]:
        for suspect in suspects(graph)[:MOST_SUSPECTS]:
            place = self._place(graph, suspect.node)
            yield "tape-singular", place, suspect.text, {"rank": float(suspect.rank)}

    def _derivatives(self, graph: Graph) -> Iterator[PlacedFact]:
        """Yield that a tensor which is no parameter takes a gradient: then losses are made of derivatives by it."""
        others = {node.variable for node in graph.of("AccumulateGrad")} - self._index.keys()
        if others:
            shapes = ", ".join(sorted(str(tuple(leaf.shape)) for leaf in others)[:MOST_SUSPECTS])
            text = f"the loss can be differentiated by what is no parameter of the model, of shape {shapes}"
            yield "tape-derivative", None, text, {"tensors": float(len(others))}

    def _cuts(self, graph: Graph) -> Iterator[PlacedFact]:
        """Yield each stretch of the model, in its order, that the loss does not reach."""
        reached = {self._index.get(node.variable) for node in graph.of("AccumulateGrad")}
        trainable = [i for param, i in self._index.items() if param.requires_grad]
        stretches = [(cut, list(group)) for cut, group in groupby(trainable, lambda i: i not in reached)]
        for place, (cut, stretch) in enumerate(stretches[: 2 * MOST_CUTS]):
            if cut:
                first, last = (self._layers[i] for i in (stretch[0], stretch[-1]))
                behind = self._layers[stretches[place + 1][1][0]].module if place + 1 < len(stretches) else None
                end = last.module or last.name
                where = f"between {end} and {behind}" if behind else f"behind {end}"
                number = f"{len(stretch)} tensor{'s' if len(stretch) > 1 else ''}"
                text = f"the loss does not reach {number}: the graph is cut {where}"
                yield "tape-cut", _common(first, last), text, {"first": float(stretch[0]), "last": float(stretch[-1])}


Said = tuple[str, str | None]
"""Kind and layer of an event."""

PlacedFact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


def is_due(step: int) -> bool:
    """Say whether the tape is read at a step in any case."""
    return step in LOOKS


def _broadcast(graph: Graph, node: Node) -> Fact | None:
    """Look for a prediction of n values that meets a target of n in n x n differences."""
    inputs = graph.inputs(node)
    if operation(node) not in ("Sub", "Rsub", "Expand") or len(inputs) != 1 or not _is_squared(node, inputs[0]):
        return None
    n, *rest = shape(inputs[0])
    shapes = f"({n}, 1) and ({n},)" if rest else f"({n},) and ({n}, 1)"
    text = f"prediction and target of shapes {shapes} make {n} x {n} differences"
    return Fact("tape-broadcast", node, text, {"samples": float(n)})


def _is_squared(node: Node, prediction: Node) -> bool:
    """Say whether n values became n x n in an operation with a constant, and nobody laid them out for it."""
    sizes, before = shape(node), shape(prediction)
    n = sizes[0] if sizes else 0
    return n > 1 and sizes == (n, n) and before in ((n, 1), (n,)) and operation(prediction) != "Unsqueeze"


def _common(first: LayerInfo, last: LayerInfo) -> str:
    """Return the innermost module that holds two tensors, or the module of the first."""
    if first == last:
        return first.name
    shared = []
    for one, other in zip(first.module.split("."), last.module.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared) or first.module or first.name


def _last_activations(models: Models) -> dict[str, str]:
    """Return, by the name of a module with parameters, the softmax or sigmoid that comes right behind it."""
    found: dict[str, str] = {}
    before = None
    for name, module in named_modules(models):
        if next(module.parameters(recurse=False), None) is not None:
            before = name
        elif before is not None and isinstance(module, LAST_ACTIVATIONS):
            found.setdefault(before, name)
    return found
