"""Find a loss that has not fallen since the run began.

The losses decide how long the loss must stand. A sequential test adds up evidence over blocks of 4 steps, and a block
of a loss that stands still rarely sets a new low. Consider runs in which every second block sets a new low, noise
included. The test stops at most a given fraction of them within a window, however often it runs (Ville's inequality).

A fall that is small next to the noise of a batch sets no more lows than a flat loss. So the losses must also show that
there is no such fall: with their noise, a fall by `hidden_fall` would be visible. If the probe of predictions and
targets has found them to fit, or cannot tell yet, the loss is not at a standstill: labels may be noisy.

Wrong for a loss that does not measure success, as in policy gradients, and for tasks that are learned in a sudden
transition after a long plateau.
"""

# T = steps of a window, B = blocks of steps

from __future__ import annotations

from gradwatch.detect.data_and_loss.loss_plateau_rules.constant_predictions import newest_check
from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import make_sign
from gradwatch.detect.features.baseline import baseline_loss
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median, slope_and_error
from gradwatch.detect.features.sequential_test import (
    SequentialTest,
    aligned_blocks,
    allowed_error,
    critical_sigmas,
    stall_likelihood_ratio,
    window_number,
)
from gradwatch.events import PAIRED, UNCLEAR
from gradwatch.history.store import History

BLOCK_STEPS = 4
"""Steps per block; the sequential test reads the median of each block."""

SETTLING_STEPS = 32
"""First steps that the trend and the test leave out: even a network that learns nothing else first learns the mean."""

MIN_WAIT_STEPS = SETTLING_STEPS + BLOCK_STEPS
"""Minimum steps before the first report, however short the patience is: a trend needs some settled losses."""


def find_stall(history: History, *, new_low: float, hidden_fall: float, travel: float) -> Sign | None:
    """Return a sign if the losses are hardly possible for a falling loss.

    Args:
        history: History of the run.
        new_low: Probability of a new low in each block at which a loss counts as falling.
        hidden_fall: Fall over the settled losses, as a fraction, that must be visible.
        travel: Sum of the update/weight ratios of the window below which the sign is for information.
    """
    if newest_check(history) in (PAIRED.name, UNCLEAR.name):
        return None
    loss_T = history.scalar("loss")
    steps_T = history.run.steps(len(loss_T))
    is_settled_T = steps_T >= SETTLING_STEPS
    settled_T = loss_T[is_settled_T]
    blocks_B = aligned_blocks(settled_T, int(steps_T[is_settled_T][0]), BLOCK_STEPS)
    error = allowed_error(SequentialTest.LOSS_STALL, window_number(history))
    if stall_likelihood_ratio(blocks_B, rate=new_low) < 1 / error:
        return None
    if _may_hide_fall(settled_T, hidden_fall, error=error):
        return None
    first, where = baseline_loss(history)
    return make_sign(history, f"it was {first:.4g} {where}", travel=travel, since=int(history.steps("loss")[0]))


def _may_hide_fall(loss_T: Floats, fall: float, *, error: float) -> bool:
    """Return whether the noise of the losses may hide a fall.

    Args:
        loss_T: Settled losses.
        fall: Fall over all of them, as a fraction.
        error: Probability that the bound of the fall is too low at any step of the window.
    """
    rise, standard_error = slope_and_error(loss_T)
    # half: a sum passes a bound at any step at most twice as often as at the last one (Lévy's inequality)
    largest_fall = (critical_sigmas(error / 2) * standard_error - rise) * len(loss_T)
    return largest_fall > fall * abs(float(median(loss_T)))
