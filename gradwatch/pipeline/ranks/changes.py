"""Date the divergence of the ranks by what only some of them did between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gradwatch.events import RANK_OPTIMIZER_LOADED, RANK_WEIGHTS_CHANGED
from gradwatch.records import Event

CHANGES = (RANK_WEIGHTS_CHANGED.name, RANK_OPTIMIZER_LOADED.name)


class Change(NamedTuple):
    """An action of some ranks before a step that the others did not take.

    Attributes:
        step: The first step after the change.
        rank: The only rank that did it, or that did not; -1 if there is no such rank.
        is_of_optimizer: Whether the state of an optimizer changed, and not the weights.
    """

    step: int
    rank: int
    is_of_optimizer: bool


def find_change(events: Mapping[int, Iterable[Event]], *, after: int, until: int) -> Change | None:
    """Return the first change of some ranks in the steps from `after` + 1 to `until`, or None.

    Args:
        events: The events of each rank.
        after: Newest step at which the weights of all ranks were equal, or -1.
        until: First step at which they were not.
    """
    who: dict[tuple[int, str], set[int]] = {}
    for rank, of_rank in events.items():
        for event in of_rank:
            if event.kind in CHANGES and after < event.step <= until:
                who.setdefault((event.step, event.kind), set()).add(rank)
    for (step, kind), ranks in sorted(who.items()):
        if others := events.keys() - ranks:
            odd = ranks if len(ranks) <= len(others) else others
            return Change(step, next(iter(odd)) if len(odd) == 1 else -1, kind == RANK_OPTIMIZER_LOADED.name)
    return None
