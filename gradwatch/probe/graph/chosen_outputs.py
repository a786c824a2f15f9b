"""Find a regression of chosen outputs, as of the values of actions in Q-learning, in the graph of a loss."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.events import CHOSEN_OUTPUTS, Observation
from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, operation

REGRESSIONS = ("HuberLoss", "MseLoss", "SmoothL1Loss")
"""Losses of a difference between a prediction and a target."""

CHOICE = "Gather"
"""Operation that takes one output of each sample, such as the value of the action that was taken."""


def find_chosen_outputs(graph: Graph) -> Iterator[Observation]:
    """Yield an observation if a regression compares chosen outputs with its targets."""
    if any(_is_chosen(graph, graph.first(loss)) for loss in graph.of(*REGRESSIONS)):
        yield CHOSEN_OUTPUTS.observe()


def _is_chosen(graph: Graph, node: Node | None) -> bool:
    """Return whether values come from a choice, past operations that only rearrange them."""
    while node is not None and operation(node) in LAYOUT and operation(node) != CHOICE:
        node = next(iter(graph.inputs(node)), None)
    return node is not None and operation(node) == CHOICE
