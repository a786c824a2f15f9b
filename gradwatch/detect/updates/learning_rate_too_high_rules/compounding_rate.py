"""Find a learning rate that compounds: it grows by the same factor again and again, long after the run has learned.

A scheduler with a factor above 1, or a factor that is applied to the result of the last one, makes a rate grow without
bound. It ends at a rate that destroys the model, however well the run goes now. A warm-up ends by itself, and differs
in two ways: a linear or a cosine one grows by less and less of itself, and an exponential one begins below the rate at
which a run learns, and helps until it ends.

Wrong for a test of rates that raises them on purpose until the loss diverges.
"""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import median
from gradwatch.history.store import History
from gradwatch.records import Quantity

WINDOW_STEPS = 64
"""Newest steps over which the rate must compound; the loss of their halves is compared."""

FIRST_STEPS = 4
"""First steps whose median loss is the first loss, and losses well below it with which the run has learned."""


def find_compounding_rate(
    history: History, *, compound: float, learned: float, half: float, fall: float
) -> Sign | None:
    """Return the sign of a rate that has compounded by a factor of `compound` since the run had learned at it.

    Args:
        history: History of the run.
        compound: Growth of the rate, as a factor, since the run had learned.
        learned: Part of the first loss that is gone once the run has learned.
        half: Part of the growth in the window, on a log scale, that its newer half must have at least.
        fall: Fall of the loss from one half of the window to the other, as a fraction, of a rate that still helps.
    """
    rate_T = history.scalar("lr.0", WINDOW_STEPS)
    if len(rate_T) < WINDOW_STEPS or not rate_T[-1] > rate_T[WINDOW_STEPS // 2] > rate_T[0] > 0:
        return None
    # a staircase may take its steps anywhere, so the halves are compared, and not the steps
    newer, whole = np.log(rate_T[-1] / rate_T[WINDOW_STEPS // 2]), np.log(rate_T[-1] / rate_T[0])
    if newer < half * whole or np.diff(rate_T).min() < 0:
        return None
    rate, usual = float(rate_T[-1]), _learned_rate(history, learned)
    if usual is None or not rate >= compound * usual > 0:
        return None
    loss_T = history.scalar("loss", WINDOW_STEPS)
    before, now = (float(median(half_T)) for half_T in np.split(loss_T, 2))
    if now < before - fall * abs(before):
        return None
    gone = "half" if learned == 0.5 else f"{100 * learned:.3g} %"
    ahead = rate * float(rate_T[-1] / rate_T[0])
    return Sign(
        f"the learning rate compounds: it is {format_factor(rate / usual)} times the rate at which the run had "
        f"learned, and will be {ahead:.3g} in {WINDOW_STEPS} steps",
        (
            Quantity(key="lr.0", value=rate),
            Quantity(key="lr.learned", label=f"largest lr.0 until {gone} of the loss was gone", value=usual),
            Quantity(key="lr.ahead", label=f"lr.0 in {WINDOW_STEPS} steps, if this continues", value=ahead),
            Quantity(key="loss.before", label="loss, 33 to 64 steps before", value=before),
            Quantity(key="loss.median", label="loss, newest 32 steps", value=now),
        ),
    )


def _learned_rate(history: History, part: float) -> float | None:
    """Return the largest rate until a part of the first loss was gone, or None if it never was."""
    loss_T, rate_T = history["loss"], history["lr.0"]
    first = float(median(first_steps(history, "loss", FIRST_STEPS)))
    learned = np.flatnonzero(loss_T < (1 - part) * first)
    # several losses, since a single batch may be an easy one
    return float(rate_T[: learned[FIRST_STEPS - 1] + 1].max()) if len(learned) >= FIRST_STEPS else None
