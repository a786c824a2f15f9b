"""Read since when gradients or weights have differed between the ranks of a distributed training."""

from __future__ import annotations

from typing import NamedTuple

from gradwatch.detect.features.events import events_of
from gradwatch.events import (
    RANK_GRADIENTS_AGREE,
    RANK_GRADIENTS_DIFFER,
    RANK_WEIGHTS_AGREE,
    RANK_WEIGHTS_DIFFER,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.records import Event, Quantity


class Difference(NamedTuple):
    """A difference between the ranks that lasts until the newest step.

    Attributes:
        since: Its first step.
        events: The event of each parameter, or one event of the whole model.
    """

    since: int
    events: tuple[Event, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parameters; empty for the whole model."""
        return tuple(event.layer for event in self.events if event.layer is not None)

    @property
    def rank(self) -> int | None:
        """The rank that differs from all others, or None if several do."""
        rank = int(self.events[0].values["rank"])
        return None if rank < 0 else rank

    def evidence(self) -> tuple[Quantity, ...]:
        """Return the rank, the number of parameters and the difference."""
        values = self.events[0].values
        return (
            *([] if self.rank is None else [Quantity(key="rank", value=float(self.rank))]),
            Quantity(key="rank.parameters", value=values["parameters"], label="parameters that differ"),
            Quantity(key="rank.difference", value=values["difference"], label="largest relative difference"),
            *([Quantity(key="rank.clipped", value=1.0, label="clipped")] if values.get("clipped") else []),
        )


def gradients_differ(history: History) -> Difference | None:
    """Return the difference of the gradients, or None if they are equal on all ranks."""
    return _newest(history, RANK_GRADIENTS_DIFFER, RANK_GRADIENTS_AGREE)


def weights_differ(history: History) -> Difference | None:
    """Return the difference of the weights, or None if they are equal on all ranks."""
    return _newest(history, RANK_WEIGHTS_DIFFER, RANK_WEIGHTS_AGREE)


def weights_agree(history: History) -> bool:
    """Return whether the weights were compared, and are equal on all ranks."""
    return weights_differ(history) is None and any(True for _ in events_of(history, RANK_WEIGHTS_AGREE))


def are_averaged(history: History, since: int) -> bool:
    """Return whether the weights were equal on all ranks after a step whose gradients differed."""
    # the update of the step is in the weights of the next step, unless its learning rate was 0, as in a warm-up
    return any(event.step > since + 1 for event in events_of(history, RANK_WEIGHTS_AGREE))


def has_lasted(history: History, since: int, patience: int) -> bool:
    """Return whether a difference has lasted long enough to report: half as long if the run has ended."""
    return history.step - since >= (patience if history.ending is None else patience // 2)


def _newest(history: History, differ: EventKind, agree: EventKind) -> Difference | None:
    events = list(events_of(history, differ))
    since = max((event.step for event in events), default=-1)
    if since < 0 or any(event.step > since for event in events_of(history, agree)):
        return None
    return Difference(since, tuple(event for event in events if event.step == since))
