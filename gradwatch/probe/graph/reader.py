"""Read the autograd graph of the loss at the first steps: the formulas and the wiring of the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.attempts import Attempts
from gradwatch.events import (
    BROADCAST,
    CUT,
    DERIVATIVE,
    LOG_OF_SOFTMAX,
    POOLED,
    SINGULAR,
    UNSTABLE,
    EventKey,
    Observation,
)
from gradwatch.formulas import Formula, stable_code
from gradwatch.probe.device.dtensor import gathers
from gradwatch.probe.graph.cross_entropy import find_chance_loss, find_class_bias
from gradwatch.probe.graph.embeddings import find_embedding_uses
from gradwatch.probe.graph.empty_means import find_empty_means
from gradwatch.probe.graph.entropy import find_minimized_entropy
from gradwatch.probe.graph.graph import LEAF, LINEAR, Graph, Node, operation, shape
from gradwatch.probe.graph.loss_rules import RULES, GraphMatch, Rule, match_divergence
from gradwatch.probe.graph.output_heads import find_depths, find_heads, find_parallel_modules
from gradwatch.probe.graph.output_uses import find_chosen_outputs, find_output_pairs
from gradwatch.probe.graph.sequence_axis import ROW_LOSSES, match_sequence_axis
from gradwatch.probe.graph.singularities import SingularFormula, find_singularities, find_unstable
from gradwatch.probe.graph.softmax_axis import LOSSES, match_axis_mixup
from gradwatch.probe.graph.unregistered import UnregisteredParams, find_adversary
from gradwatch.probe.graph.weight_means import find_custom_matrices
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import Event, LayerInfo

READ_STEPS = frozenset({0, 1, 8})
"""Steps with a read of the graph: the first, the second for loops that alternate, and one after a warm-up."""

NAN_INSPECTIONS = 3
"""Number of further reads, at the first steps with a loss or gradients that are not finite."""

MIN_TARGETS = 8
"""Minimum number of targets that a single prediction is compared with."""

MAX_SINGULARITIES = 3
MAX_CUTS = 8
MAX_MATCHES_PER_KIND = 8
"""Maximum number of observations in one read; users would not read more."""

OF_THE_LOSS = "in the graph of the loss"

LAST_ACTIVATIONS = (nn.Softmax, nn.Softmax2d, nn.Sigmoid, nn.Hardsigmoid)
OPAQUE = frozenset({"CheckpointFunction", "CompiledFunction"})
"""Nodes that hide their operations, and with them parameters of the model."""

REDUCTIONS = frozenset({"Add", "Div", "Mean", "Mul", "Sum", "ToCopy"})
"""Operations that reduce the terms of a loss to one number, or weight and add several losses."""

LOSS_SIDE = frozenset(
    {
        "Abs",
        "Add",
        "Clamp",
        "Div",
        "Exp",
        "Expand",
        "HuberLoss",
        "Mean",
        "Minimum",
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
"""Operations between a loss and the difference of prediction and target, or of two log-probabilities."""


@final
class LossGraphReader:
    """Read the autograd graph of losses at a few first steps; any other step costs one comparison.

    The reader uses names, shapes and edges of nodes, and no saved tensors, which a backward pass often has freed
    already. So it computes nothing, waits for nothing, and keeps nothing alive.

    The graph does not show the inside of a compiled graph or of reentrant activation checkpointing. A loss that is a
    plain number has no graph. Under FSDP the leaves of the graph are whole parameters, gathered for the pass and freed
    after it. Leaves that are not parameters of the model are ignored then.

    Args:
        models: A model, or several by name.
        params: Its parameters, in the order of `layers`.
        layers: The parameters' descriptions.
        optimizers: The watched optimizers.
        known: Kind and layer of the events already recorded.
        attempts: Counts the failures of each rule. An exception costs one rule at one step.

    Attributes:
        has_read: Whether any loss had a graph.
    """

    def __init__(
        self,
        models: Models,
        params: Sequence[Tensor],
        layers: Sequence[LayerInfo],
        *,
        optimizers: Sequence[Optimizer] = (),
        known: Iterable[EventKey] = (),
        attempts: Attempts | None = None,
    ) -> None:
        self._attempts = attempts or Attempts()
        self._layers = layers
        self._index = {param: i for i, param in enumerate(params)}
        self._last_activation = _last_activations(models)
        self._held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._unregistered = UnregisteredParams(models, self._held)
        self._is_gathered = any(gathers(module) for _, module in named_modules(models))
        self._nan_inspections = 0
        self.has_read = False
        self._known = set(known)

    def read(self, loss: Any, *, step: int, is_non_finite: bool = False, is_whole: bool = True) -> list[Event]:
        """Return the new events of the graph of a loss.

        Args:
            loss: Loss of the step, before or after its backward pass.
            step: Optimizer step.
            is_non_finite: Whether the loss or a gradient is not finite.
            is_whole: Whether the loss is complete, so that a parameter that it does not reach is cut off.
        """
        # a plain number and a constant have no graph
        inspects_nan = is_non_finite and self._nan_inspections < NAN_INSPECTIONS
        if not (is_due(step) or inspects_nan) or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return []
        self.has_read = True
        if (graph := self._attempts.run("the graph of the loss", Graph, loss)) is None:
            return []
        self._nan_inspections += inspects_nan
        found = [*self._match_rules(graph)]
        for part, find in self._inspections(graph, step=step, is_whole=is_whole, inspects_nan=inspects_nan).items():
            found += self._attempts.run(f"{part} {OF_THE_LOSS}", lambda find=find: [*find()]) or ()  # type: ignore[misc]
        news: dict[EventKey, Observation] = {}
        for observation in found:
            # one event for each kind and layer in a run
            if observation.key not in self._known:
                news.setdefault(observation.key, observation)
        self._known.update(news)
        return [observation.at(step) for observation in news.values()]

    def _inspections(
        self, graph: Graph, *, step: int, is_whole: bool, inspects_nan: bool
    ) -> dict[str, Callable[[], Iterable[Observation]]]:
        """Return the inspections of a whole graph, by display name."""
        of_graph = (graph, self._index, self._layers)
        inspections: dict[str, Callable[[], Iterable[Observation]]] = {
            "the classes": lambda: find_chance_loss(graph),
            "the class bias": lambda: find_class_bias(*of_graph),
            "the chosen outputs": lambda: find_chosen_outputs(graph),
            "the embeddings": lambda: find_embedding_uses(*of_graph),
            "the pairs of outputs": lambda: find_output_pairs(*of_graph),
            "the output heads": lambda: find_heads(*of_graph),
            "the parallel modules": lambda: find_parallel_modules(*of_graph),
            "the entropy": lambda: find_minimized_entropy(*of_graph),
            "the matrices": lambda: find_custom_matrices(*of_graph),
            "the unstable formulas": lambda: self._find_unstable(graph),
        }
        if not self._is_gathered:  # under FSDP the leaves are gathered copies, not the parameters of the model
            inspections |= {
                "the unregistered parameters": lambda: self._unregistered.find(graph, self._index, step=step),
                "another learner": lambda: find_adversary(graph, self._index, self._held),
                "the derivatives": lambda: self._find_derivatives(graph),
            }
            # a parameter may also be in the part of the graph that was not visited, or is hidden
            if is_whole and graph.is_complete and not graph.of(*OPAQUE):
                inspections["the cuts"] = lambda: self._find_cuts(graph)
        if graph.is_complete and not graph.of(*OPAQUE):
            inspections["the depths"] = lambda: find_depths(*of_graph)
        if inspects_nan:
            inspections["the singularities"] = lambda: self._find_singularities(graph)
            inspections["the means over nothing"] = lambda: find_empty_means(graph)
        return inspections

    def _match_rules(self, graph: Graph) -> Iterator[Observation]:
        """Yield the matches of the rules for single operations, each with the layer that it concerns."""
        rules: dict[str, tuple[Rule, Iterable[Node]]] = {name: (rule, graph.of(name)) for name, rule in RULES.items()}
        # only on the loss side of the graph, where values are predictions and targets
        rules["divergence"] = match_divergence, graph.side(REDUCTIONS)
        rules["broadcast"] = _match_broadcast, graph.side(LOSS_SIDE)
        rules["axes"] = match_axis_mixup, graph.of(*LOSSES)
        rules["sequences"] = match_sequence_axis, graph.of(*ROW_LOSSES)
        found: list[Observation] = []
        for name, (rule, nodes) in rules.items():

            def observe(node: Node, rule: Rule = rule) -> Observation | None:
                match = rule(graph, node)
                return match and match.observation._replace(layer=self._module_of(graph, match.node))

            found += filter(None, self._attempts.each(f"the {name} {OF_THE_LOSS}", observe, nodes))
        count: Counter[str] = Counter()
        for observation in found:
            count[observation.kind] += 1
            if count[observation.kind] <= MAX_MATCHES_PER_KIND:
                yield observation

    def _module_of(self, graph: Graph, node: Node) -> str | None:
        """Return the module of the nearest parameter of a node, or the activation that follows that module."""
        param = graph.parameter(node)
        i = self._index.get(param) if param is not None else None
        if i is None:
            return None
        layer = self._layers[i]
        name = layer.module or layer.name
        return self._last_activation.get(name, name)

    def _find_singularities(self, graph: Graph) -> Iterator[Observation]:
        for formula in find_singularities(graph)[:MAX_SINGULARITIES]:
            layer = self._module_of(graph, formula.node)
            values = {"rank": formula.rank, **formula.values}
            yield SINGULAR.observe(layer, values=values, description=formula.text)

    def _find_unstable(self, graph: Graph) -> Iterator[Observation]:
        """Yield the formulas that another form replaces, while every value is finite: one event for each layer."""
        by_layer: dict[str | None, list[SingularFormula]] = {}
        for found in find_unstable(graph)[:MAX_MATCHES_PER_KIND]:
            layer = self._module_of(graph, found.node)
            if found.formula is Formula.LOG_OF_FRACTION:
                yield LOG_OF_SOFTMAX.observe(layer, values=found.values)
            else:
                by_layer.setdefault(layer, []).append(found)
        for layer, formulas in by_layer.items():
            texts = [f"{f.text}: use {stable_code(f.formula, f.argument)}" for f in formulas]
            yield UNSTABLE.observe(layer, values=formulas[0].values, description="; ".join(dict.fromkeys(texts)))

    def _find_derivatives(self, graph: Graph) -> Iterator[Observation]:
        """Yield tensors that require a gradient and are not parameters: a loss may contain derivatives by them."""
        # tensors hash by identity, so a set of them is safe
        others = {node.variable for node in graph.of(LEAF)} - self._index.keys()
        if others:
            shapes = ", ".join(sorted(str(tuple(leaf.shape)) for leaf in others)[:MAX_SINGULARITIES])
            width = max(leaf.shape[-1] if leaf.ndim > 1 else 1 for leaf in others)
            yield DERIVATIVE.observe(values={"tensors": len(others), "width": width}, shapes=shapes)

    def _find_cuts(self, graph: Graph) -> Iterator[Observation]:
        """Yield each run of consecutive parameters that the loss does not reach."""
        reached = {self._index.get(node.variable) for node in graph.of(LEAF)}
        trainable = [i for param, i in self._index.items() if param.requires_grad]
        runs = [(is_cut, list(group)) for is_cut, group in groupby(trainable, lambda i: i not in reached)]
        # cut and reached runs alternate, so half of the runs are cuts
        for i, (is_cut, run) in enumerate(runs[: 2 * MAX_CUTS]):
            if is_cut:
                first, last = (self._layers[i] for i in (run[0], run[-1]))
                after = self._layers[runs[i + 1][1][0]].module if i + 1 < len(runs) else None
                end = last.module or last.name
                where = f"between {end} and {after}" if after else f"after {end}"
                number = f"{len(run)} tensor{'s' if len(run) > 1 else ''}"
                values = {"first": run[0], "last": run[-1]}
                yield CUT.observe(_common_module(first, last), values=values, number=number, where=where)


def is_due(step: int) -> bool:
    """Return whether the graph is read at a step, even if all values are finite."""
    return step in READ_STEPS


def _match_broadcast(graph: Graph, node: Node) -> GraphMatch | None:
    """Match a prediction of n values that is broadcast against n targets into n x n differences, or a single one."""
    inputs = graph.inputs(node)
    # a target is a constant: the only input with a node is the prediction
    if operation(node) not in ("Sub", "Rsub", "Expand") or len(inputs) != 1:
        return None
    if math.prod(shape(inputs[0])) == 1 and _is_pooled(graph, inputs[0], samples=math.prod(shape(node))):
        return GraphMatch(node, POOLED.observe(values={"samples": math.prod(shape(node))}))
    if not _is_squared(node, inputs[0]):
        return None
    n, *rest = shape(inputs[0])
    shapes = f"({n}, 1) and ({n},)" if rest else f"({n},) and ({n}, 1)"
    return GraphMatch(node, BROADCAST.observe(values={"samples": n}, shapes=shapes))


def _is_pooled(graph: Graph, prediction: Node, *, samples: int) -> bool:
    """Return whether a layer has as many rows as there are targets, or more, although one number is left of them."""
    rows = (shape(node)[:1] for node in graph.below(prediction) if operation(node) in LINEAR)
    return samples >= MIN_TARGETS and any(first >= (samples,) for first in rows)


def _is_squared(node: Node, prediction: Node) -> bool:
    """Return whether n values became n x n in an operation with a constant, without an explicit `unsqueeze`."""
    sizes, before = shape(node), shape(prediction)
    n = sizes[0] if sizes else 0
    # one sample broadcasts to 1 x 1, which is right
    return n > 1 and sizes == (n, n) and before in ((n, 1), (n,)) and operation(prediction) != "Unsqueeze"


def _common_module(first: LayerInfo, last: LayerInfo) -> str:
    """Return the innermost module that holds two tensors, or the module of the first."""
    if first == last:
        return first.name  # a single tensor is more precise than its module
    shared = []
    for one, other in zip(first.module.split("."), last.module.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared) or first.module or first.name


def _last_activations(models: Models) -> dict[str, str]:
    """Return the softmax or sigmoid that follows a module with parameters, by the name of that module."""
    found: dict[str, str] = {}
    before = None
    for name, module in named_modules(models):
        if next(module.parameters(recurse=False), None) is not None:
            before = name
        # modules come in the order of definition: the first activation after a layer counts
        elif before is not None and isinstance(module, LAST_ACTIVATIONS):
            found.setdefault(before, name)
    return found
