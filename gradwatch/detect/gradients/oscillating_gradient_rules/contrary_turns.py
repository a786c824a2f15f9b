"""Find alternating batches that contradict each other: one batch pulls the weights, the next ones pull them back.

The mean of a gradient's elements over their root mean square is the cosine of its angle with a fixed direction. If
batches alternate, this cosine has a part that returns with the period. Two sources that merely differ mostly pull the
same way while much is left to learn.

Wrong for an optimizer that swings by itself, which may happen at any period. Its spectrum has a hump instead of a line,
and a period of four or six steps counts only while nothing is learned.
"""

# T = steps of a window, L = parameter tensors, K = frequencies

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import baseline_loss
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, looks_in_window, window_number
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.oscillating_gradient_rules.window import (
    PATIENCE_STEPS,
    UNLEARNED_FRAC,
    WINDOW_STEPS,
    is_alternating,
)
from gradwatch.history.store import History
from gradwatch.records import Quantity

CHECK_EVERY_STEPS = 40
"""Steps between two checks, which read many gradients."""

MIN_LEFT_FRAC = 0.2
"""Fraction of the baseline loss above which much is left to learn."""

TURN_PERIODS_STEPS = (2, 3, 4, 6)
"""Steps per period: two or three sources, or two sources with two or three batches each."""

MAX_OWN_PERIOD_STEPS = 3
"""Period above which a learning optimizer may swing by itself at just that period."""

MAX_TENSORS = 64
"""Number of tensors to read, evenly spread over the model."""


def find_contrary_turns(history: History, *, contrary: float) -> Sign | None:
    """Return a sign if alternating batches pull against each other while much of the loss remains.

    Args:
        history: History of the run.
        contrary: Minimum share of the gradients, 0..1, that the batches take back from each other; half of it counts if
            nothing is learned.
    """
    if history.step < PATIENCE_STEPS or history.step % CHECK_EVERY_STEPS or "+" in history.info.optimizer:
        return None
    loss, begun = float(median(history.scalar("loss", WINDOW_STEPS))), baseline_loss(history)[0]
    if not loss >= MIN_LEFT_FRAC * begun > 0 or is_alternating(history):
        return None
    mean_TL, l2_TL = (history.param.window(name, 2 * WINDOW_STEPS) for name in ("grad.mean", "grad.l2"))
    if len(mean_TL) < 2 * WINDOW_STEPS:
        return None
    period, share = opposing_share(mean_TL, l2_TL, np.square(structure_of(history).rms_scale_L))
    is_unlearned = loss >= UNLEARNED_FRAC * begun
    least = max(contrary / (1 + is_unlearned), _share_by_chance(history, frequencies=len(mean_TL) // 2))
    if share < least or (period > MAX_OWN_PERIOD_STEPS and not is_unlearned):
        return None
    return Sign(
        f"every {period} steps the gradient opposes the gradients between: updates undo each other",
        (
            Quantity(
                key="contrary.share",
                label="fraction of the gradients that cancels out",
                value=share,
                unit="0..1",
            ),
            Quantity(key="contrary.period", label="period", value=float(period), unit="steps"),
            Quantity(key="loss.median", label="median loss of 48 steps", value=loss),
            Quantity(key="loss.start", label="loss at which learning began", value=begun),
        ),
    )


def _share_by_chance(history: History, *, frequencies: int) -> float:
    """Return the share of one frequency that noise has no more often than the test may be wrong.

    Of white noise, a frequency has more than x of the power with probability (1 - x) ** (n - 1) (Fisher 1929). The mean
    over tensors has less, however much the tensors depend on each other.
    """
    among = len(TURN_PERIODS_STEPS) * looks_in_window(CHECK_EVERY_STEPS)
    error = allowed_error(SequentialTest.CONTRARY_TURNS, window_number(history), among=among)
    return float(1 - error ** (1 / (frequencies - 1)))


def opposing_share(mean_TL: Floats, l2_TL: Floats, numel_L: Floats) -> tuple[int, float]:
    """Return the period at which gradients repeat, and the share of them that other batches take back.

    The common part of all batches moves the weights. The other batches of a period take back the rest of a batch's
    mean. In the spectrum this rest is a line at just that period. The swing of an optimizer is a hump, and noise is
    everywhere. Therefore the height of the line above the largest of its neighbors counts.

    Args:
        mean_TL: Mean of the elements of each gradient, of shape (T, L), T being a multiple of 12.
        l2_TL: Norms of the gradients. Tensors without a gradient at some step are left out.
        numel_L: Numbers of elements.

    Returns:
        The number of steps, and the share of the squared cosines, 0..1, as the mean over tensors (a weight before a
            softmax shows nothing); it is below 0 for random batches.
    """
    every = -(-mean_TL.shape[1] // MAX_TENSORS)  # rounded up
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_TL = mean_TL[:, ::every] * np.sqrt(numel_L[::every]) / l2_TL[:, ::every]
    cosine_TL = cosine_TL[:, np.isfinite(cosine_TL).all(axis=0) & cosine_TL.any(axis=0)]
    if not cosine_TL.size:
        return 1, 0.0
    power_KL = np.square(np.abs(np.fft.rfft(cosine_TL / np.abs(cosine_TL).max(axis=0), axis=0)))
    power_KL[1:-1] *= 2  # negative frequencies hold as much again
    share_K = (power_KL / power_KL.sum(axis=0)).mean(axis=1)
    found = []
    for period in TURN_PERIODS_STEPS:
        # T is a multiple of 12, so each period falls on one frequency exactly
        line = len(cosine_TL) // period
        neighbours = [share_K[k] for k in (line - 2, line - 1, line + 1, line + 2) if k < len(share_K)]
        found.append((float(share_K[line] - max(neighbours)), period))
    share, period = max(found)
    return period, share
