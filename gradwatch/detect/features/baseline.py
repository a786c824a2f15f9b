"""Read the first steps of a run, which the history keeps for good, so that each statistic is read once."""

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
"""Number of first recorded steps that count as the start of the run."""

MIN_ZERO_STEPS = 8
"""Losses of exactly 0 in a row that rule out chance: as many steps as `no-gradient` waits for a gradient."""

_known: WeakKeyDictionary[History, dict[str, Floats]] = WeakKeyDictionary()
_first_losses: WeakKeyDictionary[History, float] = WeakKeyDictionary()


def first_steps(history: History, statistic: str, length: int = BASELINE_STEPS) -> Floats:
    """Return a statistic over the first recorded steps.

    Args:
        history: History of the run, with at least one recorded step.
        statistic: Name of the statistic, such as `loss`.
        length: Number of steps, at most `BASELINE_STEPS`.

    Returns:
        Values of shape (at most length,), or (at most length, L) for a statistic of layers.
    """
    found = _known.setdefault(history, {})
    # a run shorter than the baseline still grows, so its values are read again at each call
    if len(found.get(statistic, ())) < BASELINE_STEPS:
        # a copy, so that the cache holds no view of the history
        found[statistic] = np.array(history[statistic][:BASELINE_STEPS])
    return found[statistic][:length]


def first_measured(history: History, statistic: str) -> Floats:
    """Return a statistic of layers at the first of the first steps that measured it, of shape (L,).

    A gradient scaler skips the first steps until its scale fits. These measure no weights and no updates, and leave
    gradients that are not finite.
    """
    return np.asarray(first_steps(history, statistic)[first_measured_row(history, statistic)])


def first_measured_row(history: History, statistic: str) -> int:
    """Return the first of the first recorded steps that measured a statistic of layers, or 0 if none did."""
    values_TL = first_steps(history, statistic)
    return int(np.argmax(np.isfinite(values_TL).any(axis=1) & ~np.isinf(values_TL).any(axis=1)))


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
    """Return the median loss of the newest steps: a median removes the noise of single batches."""
    return float(median(history.scalar("loss", steps)))


def is_learned(history: History, *, left: float) -> bool:
    """Return whether less than `left` of the first loss remains, so that odd gradients do no harm."""
    # a negative loss has no zero to be near
    return 0 <= newest_loss(history) < left * first_loss(history)


def is_zero_from_start(history: History) -> bool:
    """Return whether all of at least `MIN_ZERO_STEPS` losses since the first step are exactly 0.

    Only for the first steps that a window holds: later steps do not show what came before.
    """
    loss_T = history.scalar("loss")
    return MIN_ZERO_STEPS <= len(loss_T) == history.step + 1 and not loss_T.any()  # nan is true


def chance_losses(history: History) -> Iterator[float]:
    """Yield the chance-level loss of each cross entropy of the run: the log of its number of classes."""
    for event in events_of(history, CHANCE):
        if event.values["classes"] > 1:  # the loss of a single class is always 0
            yield event.values["nat"] * math.log(event.values["classes"])


def baseline_loss(history: History) -> tuple[float, str]:
    """Return the loss from which learning begins, and a phrase that names its origin.

    The baseline is the loss of the first steps. For a cross entropy it is the chance-level loss if that is smaller: a
    network that starts above chance level and falls to it has learned nothing yet.
    """
    first = first_loss(history)
    chance = next((loss for loss in chance_losses(history) if loss < first), None)
    return (first, "at the start") if chance is None else (chance, "at chance level")
