"""Find weights that have hardly moved over the whole run while the loss stays at its start."""

# T = steps that measured the updates

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median, trend
from gradwatch.detect.updates.learning_rate_too_low_rules.negligible_updates import small_update_evidence
from gradwatch.history.store import History
from gradwatch.history.table import WINDOW, Steps

MIN_STEPS = 100
"""Steps after which a loss that stays at its start is conclusive."""

MIN_STANDING_FRAC = 0.99
"""Part of the first loss above which the loss stays at its start: noise alone makes medians of 16 and 50 losses differ
by as much."""

MAX_FALLING_TREND = -1.5
"""Slope of the loss, in standard errors, below which it is falling, as in `loss-plateau`."""


def find_short_travel(history: History, steps_T: Steps, level_T: Floats, *, travel: float) -> Sign | None:
    """Return the sign of a sum of update/weight ratios below `travel`, if the loss stays at its start."""
    length = min(history.step + 1, WINDOW)
    # each measured ratio stands for the steps up to the next; the largest for those before the first
    total = float(level_T @ np.diff(steps_T, append=history.step) + level_T.max() * steps_T[0])
    if not history.step >= MIN_STEPS or total >= travel or (history.scalar("skipped", length) == 1).any():
        return None
    loss_T = history.scalar("loss", length)
    first, newest = float(median(first_steps(history, "loss"))), float(median(loss_T[-MIN_STEPS // 2 :]))
    if not newest > MIN_STANDING_FRAC * first > 0 or not trend(loss_T) > MAX_FALLING_TREND:
        return None
    return Sign(
        f"in {history.step} steps the weights have changed by at most {100 * total:.1g} %, and the loss has not fallen",
        small_update_evidence(history, float(level_T.max())),
        since=int(steps_T[0]),
    )
