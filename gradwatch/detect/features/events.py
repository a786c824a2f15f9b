"""Read the events of a run, which describe it in addition to its statistics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.events import PADDED_INPUT, PADDING_READ, POLICY, EventKind
from gradwatch.history.store import History
from gradwatch.records import Event


def events_of(history: History, kind: EventKind) -> Iterator[Event]:
    """Yield the events of a kind up to the newest step, in recording order."""
    for event in history.events:
        if event.kind == kind.name and event.step <= history.step:
            yield event


def reads_padding(history: History, layer: str) -> bool:
    """Return whether a module, or the module of a tensor, may read padding, so that its gradient vanishes."""
    events = (*events_of(history, PADDING_READ), *events_of(history, PADDED_INPUT))
    return any(event.layer and f"{layer}.".startswith(f"{event.layer}.") for event in events)


def is_policy_gradient(history: History) -> bool:
    """Return whether the loss is a policy gradient: its advantages measure no success, and are mended as it learns.

    The graph of a classification with a weight for each sample looks the same, but has no weights of both signs, and
    without these no entropy is read.
    """
    return any(events_of(history, POLICY)) and not np.isnan(history["policy.entropy"]).all()
