"""What the run was like when it began: its first steps are kept for good, so they need to be looked up only once."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np

from gradwatch.detect.features.events import noted
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.events import CHANCE
from gradwatch.history.store import History

STEPS = 16
"""First recorded steps that count as the beginning."""

_known: WeakKeyDictionary[History, dict[str, Floats]] = WeakKeyDictionary()


def beginning(history: History, statistic: str, length: int = STEPS) -> Floats:
    """Return a statistic over the first recorded steps: shape (at most length,), with L behind it for one of layers.

    Args:
        history: Of which at least one step is recorded.
        statistic: Such as `loss`.
        length: At most `STEPS`.
    """
    found = _known.setdefault(history, {})
    if len(found.get(statistic, ())) < STEPS:
        found[statistic] = np.array(history[statistic][:STEPS])
    return found[statistic][:length]


def is_learned(history: History, *, left: float = 0.02) -> bool:
    """Say whether next to nothing of the first loss is left, so that what is odd about gradients does no harm."""
    first, newest = float(median(beginning(history, "loss"))), float(median(history.scalar("loss", STEPS)))
    return 0 <= newest < left * first


def start(history: History) -> tuple[float, str]:
    """Return the loss from which learning begins, and what it is.

    That of the first steps, or, of a cross entropy, that of knowing nothing where it is less: a network begins above
    it, and has learned nothing when it has come there.
    """
    first = float(median(beginning(history, "loss")))
    for event in noted(history, CHANCE):
        knowing_nothing = event.values["nat"] * math.log(event.values["classes"])
        if knowing_nothing < first:
            return knowing_nothing, "for who knows nothing"
    return first, "in the beginning"
