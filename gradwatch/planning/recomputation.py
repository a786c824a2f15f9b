"""Choose the modules to recompute by dynamic programming: least cost, for a limit of the saved activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from gradwatch.planning.result import ModuleRow, work

MAX_STATES = 256
"""Choices to keep after each module: the cheapest in each of this many equal ranges of bytes."""


def recomputation_cost(row: ModuleRow, device: str) -> float:
    """Return the cost of recomputing a module: its measured milliseconds, or its work in operations."""
    if not math.isnan(row.forward_ms):
        return row.forward_ms
    return work(row.flops, row.moved_bytes, device)


@final
@dataclass(slots=True)
class ModuleTree:
    """A module that ran, with the modules that it called, in the order of their calls."""

    row: ModuleRow
    children: list[ModuleTree] = field(default_factory=list)

    @property
    def own_bytes(self) -> int:
        """Saved bytes that no child has saved."""
        return self.row.saved_bytes - sum(child.row.saved_bytes for child in self.children)

    @classmethod
    def of(cls, rows: Iterable[ModuleRow]) -> ModuleTree:
        """Return the tree of a model's rows, whose first row is the model."""
        root, *others = [cls(row) for row in rows if row.order >= 0]
        nodes = {node.row.name: node for node in others}
        for node in others:
            names = node.row.name.split(".")
            outer = (".".join(names[:i]) for i in range(len(names) - 1, 0, -1))
            next((nodes[name] for name in outer if name in nodes), root).children.append(node)
        for node in (root, *others):
            node.children.sort(key=lambda child: child.row.order)
        return root


_Names: TypeAlias = "tuple[str, _Names] | None"
"""Names as a linked list, so that states share common parts."""


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes that are stored after some modules, the cost of recomputing, and the modules chosen so far."""

    stored: int
    cost: float
    chosen: _Names = None


def cheapest_recomputation(root: ModuleTree, limit: int, device: str) -> tuple[str, ...] | None:
    """Return the names of the modules whose recomputation costs least, or None if no choice stays within a limit.

    A recomputed module keeps its inputs. In its own backward pass, everything that it saves is in memory again, in
    addition to what earlier modules keep. So recomputing the last module saves nothing, unless something larger comes
    after it.

    Args:
        root: The model.
        limit: Largest sum of saved activations, at the end of the forward pass and in the backward pass of each module.
        device: Type of the device.
    """
    states = _after(root, [_State(0, 0.0)], limit, device, is_root=True)
    if not states:
        return None
    return tuple(reversed(list(_names(min(states, key=lambda s: (s.cost, s.stored)).chosen))))


def _after(node: ModuleTree, states: list[_State], limit: int, device: str, *, is_root: bool = False) -> list[_State]:
    """Return the best states after a module, from those before it."""
    row, kept = node.row, states
    for child in node.children:
        kept = _after(child, kept, limit, device)
    found = [_State(s.stored + node.own_bytes, s.cost, s.chosen) for s in kept if s.stored + node.own_bytes <= limit]
    if not is_root and row.is_repeatable and row.saved_bytes > row.input_bytes:
        cost = recomputation_cost(row, device)
        found += [
            _State(s.stored + row.input_bytes, s.cost + cost, (row.name, s.chosen))
            for s in states
            if s.stored + row.saved_bytes <= limit
        ]
    return _best(found)


def _best(states: Sequence[_State]) -> list[_State]:
    """Return the states that no other state beats in both bytes and cost; if there are many, one per step of bytes."""
    best: list[_State] = []
    for state in sorted(states, key=lambda s: (s.stored, s.cost)):
        if not best or state.cost < best[-1].cost:
            best.append(state)
    if len(best) <= MAX_STATES:
        return best
    step = (best[-1].stored - best[0].stored) / MAX_STATES
    # the last of a step is its cheapest; the first of all stores least
    return [best[0], *{int((s.stored - best[0].stored) / step): s for s in best[1:]}.values()]


def _names(chosen: _Names) -> Iterator[str]:
    while chosen:
        name, chosen = chosen
        yield name
