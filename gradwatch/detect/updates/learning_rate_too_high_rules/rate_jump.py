"""Find a learning rate that jumps above all its earlier values, and raises the loss."""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS, last_jump
from gradwatch.detect.features.robust_stats import median
from gradwatch.history.store import History
from gradwatch.records import Quantity

BLOCK_STEPS = 6
"""Steps before and after a jump that show its effect by their median loss. The start of a warm-up is not a jump."""


def find_rate_jump(history: History, *, jump: float, worse: float) -> Sign | None:
    """Return the sign of a group's rate jump by a factor of `jump`, if the loss rises by `worse` after it."""
    for group in range(history.groups):
        rate_T = history.scalar(f"lr.{group}", JUMP_WINDOW_STEPS)
        at = last_jump(rate_T, jump) or 0
        # both sides of the jump need a block of losses
        is_inside = BLOCK_STEPS <= at <= len(rate_T) - BLOCK_STEPS
        if not is_inside or _was_reached_before(history, group, rate_T[at], jump):
            continue
        highest = float(np.fmax.reduce(rate_T[:at]))
        loss_T = history.scalar("loss", JUMP_WINDOW_STEPS)
        # the loss at the jump itself precedes the update at the new rate
        before, after = float(median(loss_T[max(0, at - BLOCK_STEPS) : at])), float(median(loss_T[at + 1 :]))
        if after <= worse * before:
            continue
        step = int(history.run.steps(JUMP_WINDOW_STEPS)[at])
        return Sign(
            f"the learning rate rose {format_factor(rate_T[at] / highest)}-fold, and then the loss rose",
            (
                Quantity(key="lr.jump_step", label="jump at step", value=float(step)),
                Quantity(key="lr.before", label=f"lr.{group} before", value=highest),
                Quantity(key="lr.after", label=f"lr.{group} after", value=float(rate_T[at])),
                Quantity(key="loss.before", label="loss before", value=before),
                Quantity(key="loss.after", label="loss after", value=after),
            ),
            since=step,
        )
    return None


def _was_reached_before(history: History, group: int, rate: float, jump: float) -> bool:
    """Return whether the rate was nearly as high before the window, as with warm restarts."""
    earlier_T = history[f"lr.{group}"][:-JUMP_WINDOW_STEPS]
    return len(earlier_T) > 0 and rate < jump * float(np.fmax.reduce(earlier_T))
