"""Find a loss that has not fallen since the run began.

The losses decide how long the loss must stand. A sequential test adds up evidence over blocks of 4 steps, and a block
of a loss that stands still rarely sets a new low. Consider runs in which every second block sets a new low, noise
included. The test stops at most a given fraction of them within a window, however often it runs (Ville's inequality).

Wrong for a loss that does not measure success, as in policy gradients, and for tasks that are learned in a sudden
transition after a long plateau.
"""

# T = steps of a window, B = blocks of steps

from __future__ import annotations

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import make_sign
from gradwatch.detect.features.baseline import baseline_loss
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.sequential_test import aligned_blocks, stall_likelihood_ratio
from gradwatch.history.store import History

BLOCK_STEPS = 4
"""Steps per block; the sequential test reads the median of each block."""

SETTLING_STEPS = 32
"""First steps that the trend and the test leave out: even a network that learns nothing else first learns the mean."""

MIN_WAIT_STEPS = SETTLING_STEPS + BLOCK_STEPS
"""Minimum steps before the first report, however short the patience is: a trend needs some settled losses."""

NEW_LOW_RATE = 0.5
"""Probability of a new low in each block at which a loss counts as falling."""


def find_stall(history: History, *, error: float) -> Sign | None:
    """Return a sign if a falling loss would give such losses with a probability of at most `error`."""
    loss_T = history.scalar("loss")
    steps_T = history.run.steps(len(loss_T))
    is_settled_T = steps_T >= SETTLING_STEPS
    blocks_B = aligned_blocks(loss_T[is_settled_T], int(steps_T[is_settled_T][0]), BLOCK_STEPS)
    first, where = baseline_loss(history)
    is_stalled = stall_likelihood_ratio(blocks_B, rate=NEW_LOW_RATE) >= 1 / error
    if not is_stalled:
        return None
    return make_sign(history, f"it was {first:.4g} {where}", since=int(history.steps("loss")[0]))
