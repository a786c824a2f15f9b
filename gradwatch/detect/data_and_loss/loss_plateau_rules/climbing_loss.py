"""Find a loss that climbs from the start and keeps climbing: the updates go uphill.

Half of the blocks of steps set a new high. A loss that has settled, however noisy, does so in one of n blocks, and one
that a warm-up or a first large update throws up stops climbing. The loss of a game, of a policy or of the values of
actions may climb while the agent learns, so it is for information.
"""

# T = steps of a window, B = blocks of steps

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import make_sign
from gradwatch.detect.features.baseline import baseline_loss, chance_losses, first_steps
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import Floats, block_medians
from gradwatch.history.store import History
from gradwatch.records import Quantity

BLOCK_STEPS = 4
"""Steps per block, whose median counts."""

CLIMB = "loss.climb"


def find_climbing_loss(history: History, *, growth: float, highs: float, wait: float, travel: float) -> Sign | None:
    """Return a sign if the loss has climbed since the run began, and the newest block of steps is a new high.

    Args:
        history: History of a run whose loss began above zero and has not fallen.
        growth: Newest loss in units of the largest of the first steps, or of chance level, at least.
        highs: Fraction of the blocks that set a new high, at least, over all steps and over the newer half.
        wait: Losses, at least.
        travel: As in `make_sign`.
    """
    loss_T = history["loss"]
    first, where = baseline_loss(history)
    # no healthy training takes a cross entropy far above chance level
    top = min([*chance_losses(history), float(np.fmax.reduce(first_steps(history, "loss")))])
    # cheap: the newest loss is not a multiple of the first ones
    is_larger = 0 < growth * top < loss_T[-1]
    if not is_larger or len(loss_T) < max(wait, 2 * BLOCK_STEPS) or not np.isfinite(loss_T).all():
        return None
    median_B: Floats = block_medians(loss_T, BLOCK_STEPS)
    is_high_B = median_B[1:] > np.maximum.accumulate(median_B)[:-1]
    newer_B = is_high_B[len(is_high_B) // 2 :]
    if not (is_high_B[-1] and is_high_B.mean() >= highs and newer_B.mean() >= highs):
        return None
    climb = float(median_B[-1]) / first
    why = f"it was {first:.4g} {where}, and has climbed {format_fold(math.log10(climb))}"
    sign = make_sign(history, why, travel=travel)
    quantity = Quantity(key=CLIMB, label="newest loss, over the first", value=climb)
    return sign._replace(evidence=(quantity, *sign.evidence), since=int(history.steps("loss")[0]))
