"""Find on the tape of a loss another learner that judges what the model gives, as the critic of a generator does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from gradwatch.probe.graph.graph import Graph, is_leaf

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


def facts(graph: Graph, index: Mapping[Tensor, int], held: Collection[int]) -> Iterator[Fact]:
    """Yield that parameters which are neither the model's nor its optimizers' stand between it and the loss.

    Somebody else moves them, so that a loss which stays where it was says nothing of the model alone.

    Args:
        graph: Tape of a loss.
        index: Place of each parameter of the model.
        held: `id` of what the watched optimizers move.
    """
    for node in graph.nodes:
        others = [leaf for leaf in graph.inputs(node) if is_leaf(leaf) and _is_anothers(leaf.variable, index, held)]
        if others and any(is_leaf(leaf) and leaf.variable in index for leaf in graph.below(node)):
            yield "tape-opponent", None, "parameters of another learner stand between the model and the loss", {}
            return


def _is_anothers(leaf: Tensor, index: Mapping[Tensor, int], held: Collection[int]) -> bool:
    return isinstance(leaf, nn.Parameter) and leaf not in index and id(leaf) not in held
