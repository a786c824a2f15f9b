"""Read the events of a run, which describe it in addition to its statistics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.events import (
    ADVERSARY,
    ASCENDED,
    CHOSEN_OUTPUTS,
    MAJORITY_PREDICTED,
    MINORITY_PREDICTED,
    PADDED_INPUT,
    PADDING_READ,
    POLICY,
    WEIGHTS_TRAINED,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.records import Event


def events_of(history: History, kind: EventKind) -> Iterator[Event]:
    """Yield the events of a kind up to the newest step, in recording order."""
    for event in history.events:
        if event.kind == kind.name and event.step <= history.step:
            yield event


def majority_event(history: History) -> Event | None:
    """Return the event that only the majority class is predicted, or None if other classes are predicted, too."""
    changes = (*events_of(history, MAJORITY_PREDICTED), *events_of(history, MINORITY_PREDICTED))
    newest = max(changes, key=lambda event: event.step, default=None)
    return newest if newest is not None and newest.kind == MAJORITY_PREDICTED.name else None


def reads_padding(history: History, layer: str) -> bool:
    """Return whether a module, or the module of a tensor, may read padding, so that its gradient vanishes."""
    events = (*events_of(history, PADDING_READ), *events_of(history, PADDED_INPUT))
    return any(event.layer and f"{layer}.".startswith(f"{event.layer}.") for event in events)


def is_ascended(history: History, layer: str) -> bool:
    """Return whether a module, or a tensor, is moved up the gradient, as the multiplier of a constraint is.

    Its gradient is what is left to fulfil, and vanishes if the constraint holds.
    """
    return any(event.layer and f"{event.layer}.".startswith(f"{layer}.") for event in events_of(history, ASCENDED))


def is_policy_gradient(history: History) -> bool:
    """Return whether the loss is a policy gradient: its advantages do not measure success and shift as it learns.

    The graph of a classification with a weight for each sample looks the same, but has no weights of both signs, and
    without these no entropy is read.
    """
    return any(events_of(history, POLICY)) and not np.isnan(history["policy.entropy"]).all()


def measures_success(history: History) -> bool:
    """Return whether the loss must fall if the model learns: it is not a game, and the model was not trained before.

    The loss of a game between several learners, a policy gradient, or the error of the values of actions, whose targets
    grow with the agent, may stand still or rise meanwhile. A model that was trained before begins with the loss that it
    has reached.
    """
    moves = any(event for kind in (ADVERSARY, CHOSEN_OUTPUTS) for event in events_of(history, kind))
    is_game = "+" in history.info.optimizer or moves or is_policy_gradient(history)
    return not is_game and not was_trained(history)


def was_trained(history: History) -> bool:
    """Return whether the weights had been changed many times when the monitor attached."""
    return any(events_of(history, WEIGHTS_TRAINED))
