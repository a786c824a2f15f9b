"""Find waves: the gradient norm swings up and down, and the loss returns to its start with each swing.

Small batches spread norms as widely, but without correlation from step to step. An optimizer that overshoots
alternates, so the correlation is near -1. Badly ordered data swing slowly, so the correlation is near 1.

Wrong for alternating tasks with different losses, which `is_alternating` recognizes by their separate layers. Also
wrong for targets that move: the swings of values grow, and a regression of chosen outputs is Q-learning, whose loss
returns with each copy of the target network. The loss of a policy gradient has the sign and the size of the advantages
of its batch, which may be a piece of one episode. All are left out.
"""

# T = steps of a window

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from gradwatch.detect.features.events import events_of, is_policy_gradient
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, log10
from gradwatch.detect.gradients.oscillating_gradient_rules.window import (
    NORM,
    WINDOW_STEPS,
    is_alternating,
    max_first_loss,
)
from gradwatch.events import CHOSEN_OUTPUTS
from gradwatch.history.store import History
from gradwatch.records import Quantity

WAVE_WINDOWS_STEPS = (WINDOW_STEPS, 2 * WINDOW_STEPS)
"""Windows in which norms swing several times: the longer window is for waves of up to 30 steps."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WaveBounds:
    """Thresholds of waves of the norm and the loss; see the arguments of `OscillatingGradient`."""

    decades: float
    correlation: float
    crossings: int
    return_to: float
    loss_ratio: float
    returns: int
    peak_growth: float
    task_frac: float


def find_waves(history: History, bounds: WaveBounds, *, length: int) -> Sign | None:
    """Return a sign if norm and loss swing in waves over the newest steps.

    Args:
        history: History of the run.
        bounds: Thresholds of the waves.
        length: Number of steps to read, one of `WAVE_WINDOWS_STEPS`.
    """
    loss_T = history.scalar("loss", length)
    if len(loss_T) < length:
        return None
    low, high = _low_high(np.sort(loss_T))
    if not high > bounds.loss_ratio * abs(low):  # also if one is nan
        return None
    spread, steady, crossed = oscillation(log10(history.scalar(NORM, length)))
    if not (spread >= bounds.decades and abs(steady) >= bounds.correlation and crossed >= bounds.crossings):
        return None
    if not _comes_back(loss_T, bounds, peak=bounds.return_to * max_first_loss(history)):
        return None
    if _is_growing(history, bounds, high=high) or is_alternating(history, task_frac=bounds.task_frac):
        return None
    if any(events_of(history, CHOSEN_OUTPUTS)) or is_policy_gradient(history):
        return None
    return Sign(
        f"the gradient norm swings by a factor of {10**spread:.3g}, and the loss returns to its start",
        (
            Quantity(
                key="grad_norm.spread_decades",
                label="largest / smallest grad_norm.before_clip",
                value=spread,
                unit="orders of magnitude",
            ),
            Quantity(key="grad_norm.autocorrelation", label="correlation from step to step", value=steady),
            Quantity(
                key="grad_norm.crossings", label=f"crossings of the median in {length} steps", value=float(crossed)
            ),
            Quantity(key="loss.low", label="10 % quantile of the loss", value=low),
            Quantity(key="loss.high", label="90 % quantile of the loss", value=high),
        ),
    )


def oscillation(log_T: Floats) -> tuple[float, float, int]:
    """Return the detrended spread, the correlation from step to step and the number of crossings."""
    place_T = np.arange(len(log_T)) - (len(log_T) - 1) / 2
    # without the trend: a norm that only rises or falls does not swing
    rest_T = log_T - log_T.mean() - place_T * (place_T @ log_T) / (place_T @ place_T)
    low, high = _low_high(np.sort(rest_T))
    above_T = rest_T > (low + high) / 2
    power = float(rest_T @ rest_T)
    correlation = float(rest_T[1:] @ rest_T[:-1]) / power if power > 0 else 0.0
    return high - low, correlation, int(np.count_nonzero(above_T[1:] != above_T[:-1]))


def _low_high(sorted_T: Floats) -> tuple[float, float]:
    """Return the 10 % and the 90 % quantile of a sorted window."""
    return float(sorted_T[len(sorted_T) // 10]), float(sorted_T[-len(sorted_T) // 10])


def _comes_back(loss_T: Floats, bounds: WaveBounds, *, peak: float) -> bool:
    """Return whether the loss has repeatedly fallen far below a peak and returned to it."""
    # a return counts only after a deep fall, so noise around the peak does not count
    was_low, returns = False, 0
    for loss in loss_T.tolist():
        if was_low and loss >= peak:
            was_low, returns = False, returns + 1
        was_low = was_low or loss < peak / bounds.loss_ratio
    return returns >= bounds.returns


def _is_growing(history: History, bounds: WaveBounds, *, high: float) -> bool:
    """Return whether the loss also swung in the previous window, but clearly less."""
    loss_T = np.sort(history.scalar("loss", 2 * WINDOW_STEPS)[:-WINDOW_STEPS])
    if len(loss_T) < WINDOW_STEPS:
        return False
    low_before, high_before = _low_high(loss_T)
    return high_before > bounds.loss_ratio * abs(low_before) and high > bounds.peak_growth * high_before
