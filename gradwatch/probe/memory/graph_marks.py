"""Mark the autograd graphs of some successive steps, and check later whether all of them are still alive."""

from __future__ import annotations

import gc
import weakref
from typing import final

from gradwatch.probe.graph.graph import Node, is_leaf

FIRST_STEP = 2
"""First step with a mark. Loops often keep something of their first two steps on purpose."""

MARKED_STEPS = 5
"""Number of successive steps with a mark in a round. Only a leak keeps the graphs of all of them."""

REST_STEPS = 10
"""Steps from the last mark of a round to its check. A loop may keep the graphs of its last few steps for a while."""

SECOND_START, ROUND_FACTOR = 64, 8
"""Step of the second round, and the factor from one later round to the next: a leak may begin after the training."""

MAX_MARKED_NODES = 500
"""Maximum number of nodes to mark in one graph, 3 us each."""

MAX_SEARCHED_NODES = 20_000
"""Maximum number of nodes in which one search looks for a mark."""


@final
class Mark:
    """Lives as long as a node that holds it in its metadata."""

    __slots__ = ("__weakref__",)


@final
class GraphMarks:
    """Mark the graphs of `MARKED_STEPS` steps, and check them `REST_STEPS` later. Later rounds are further apart.

    A node of autograd keeps a dictionary for the user, `metadata`, until the node is freed. So a mark in it shows
    without a measurement whether anything keeps the graph: the mark dies with its last node. Nodes that accumulate the
    gradient of a parameter are not marked, since successive graphs share them.
    """

    def __init__(self) -> None:
        self._key = object()  # two monitors mark the same graph
        self._marks: dict[int, weakref.ref[Mark]] = {}
        self._start: int | None = None
        self._next_start = FIRST_STEP

    def begin(self, step: int) -> None:
        """Begin a round at the step in progress, if one is due."""
        if self._start is None and step >= self._next_start:
            self._start, self._next_start = step, max(SECOND_START, ROUND_FACTOR * step)

    def end(self) -> None:
        """End the round."""
        self._start = None
        self._marks.clear()

    def is_idle(self, step: int) -> bool:
        """Return whether there is neither a round in progress nor one due at a step."""
        return self._start is None and step < self._next_start

    def is_marking(self, step: int) -> bool:
        """Return whether the graphs of a step are to be marked."""
        return self._start is not None and self._start <= step < self._start + MARKED_STEPS

    def is_over(self, step: int) -> bool:
        """Return whether the round is to be checked after a step."""
        return self._start is not None and step >= self._start + MARKED_STEPS + REST_STEPS - 1

    def mark(self, root: Node, step: int) -> None:
        """Mark the graph of a node, as far as earlier calls have not marked it."""
        known = self._marks.get(step)
        mark = (known and known()) or Mark()
        self._marks[step] = weakref.ref(mark)
        waiting, left = [root], MAX_MARKED_NODES
        while waiting and left:
            node = waiting.pop()
            if is_leaf(node) or self._key in node.metadata:
                continue
            node.metadata[self._key] = mark
            left -= 1
            waiting += [child for child, _ in node.next_functions if child is not None]

    def kept_steps(self) -> list[int]:
        """Return the marked steps if a graph of each of them is alive, else none."""
        if len(self._marks) < MARKED_STEPS or not self._are_alive():
            return []
        gc.collect()  # a cycle of objects keeps a graph until the collector runs
        return sorted(self._marks) if self._are_alive() else []

    def keeps(self, root: Node) -> bool:
        """Return whether a node keeps the graph of a marked step alive."""
        waiting, seen = [root], {root}
        while waiting and len(seen) < MAX_SEARCHED_NODES:
            node = waiting.pop()
            if self._key in node.metadata:
                return True
            new = [child for child, _ in node.next_functions if child is not None and child not in seen]
            seen.update(new)
            waiting += new
        return False

    def _are_alive(self) -> bool:
        return all(mark() is not None for mark in self._marks.values())
