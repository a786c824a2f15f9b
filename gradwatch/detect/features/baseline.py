"""Look up what the run was like when it began. Its first steps are kept for good, so each is read only once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.events import CHANCE
from gradwatch.history.store import History

BASELINE_STEPS = 16
"""First recorded steps that count as the beginning of the run."""

_known: WeakKeyDictionary[History, dict[str, Floats]] = WeakKeyDictionary()
_first_losses: WeakKeyDictionary[History, float] = WeakKeyDictionary()


def first_steps(history: History, statistic: str, length: int = BASELINE_STEPS) -> Floats:
    """Return a statistic over the first recorded steps.

    Args:
        history: Of the run, with at least one recorded step.
        statistic: Such as `loss`.
        length: At most `BASELINE_STEPS`.

    Returns:
        Values of shape (at most length,), or (at most length, L) for a statistic of layers.
    """
    found = _known.setdefault(history, {})
    if len(found.get(statistic, ())) < BASELINE_STEPS:
        found[statistic] = np.array(history[statistic][:BASELINE_STEPS])
    return found[statistic][:length]


def first_loss(history: History) -> float:
    """Return the median loss of the first `BASELINE_STEPS` steps."""
    found = _first_losses.get(history)
    if found is None:
        loss_T = first_steps(history, "loss")
        found = float(median(loss_T))
        if len(loss_T) == BASELINE_STEPS:  # before that, the next step changes it
            _first_losses[history] = found
    return found


def newest_loss(history: History, steps: int = BASELINE_STEPS) -> float:
    """Return the median loss of the newest steps, in which the noise of single batches is gone."""
    return float(median(history.scalar("loss", steps)))


def is_learned(history: History, *, left: float = 0.02) -> bool:
    """Return whether next to nothing of the first loss is left, so that odd gradients do no harm."""
    return 0 <= newest_loss(history) < left * first_loss(history)


def chance_losses(history: History) -> Iterator[float]:
    """Yield the loss of a model that knows nothing, for each cross entropy of the run: the log of its classes."""
    for event in events_of(history, CHANCE):
        yield event.values["nat"] * math.log(event.values["classes"])


def baseline_loss(history: History) -> tuple[float, str]:
    """Return the loss from which learning begins, and a phrase that says where it comes from.

    It is the loss of the first steps. For a cross entropy it is the chance-level loss if that is smaller: a network
    may begin above that level, and has learned nothing by the time it comes down to it.
    """
    first = first_loss(history)
    chance = next((loss for loss in chance_losses(history) if loss < first), None)
    return (first, "at the start") if chance is None else (chance, "at chance level")
