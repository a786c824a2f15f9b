"""Find a learning rate that rises above all its earlier values, in a jump or gradually, and raises the loss."""

# T = steps of a window, B = blocks of steps

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS, last_jump
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

BLOCK_STEPS = 6
"""Steps before and after a jump that show its effect by their median loss. The start of a warm-up is no jump."""


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


def find_rate_ramp(history: History, *, jump: float, worse: float, large: float) -> Sign | None:
    """Return the sign of a rate that rose by `jump` since the lowest loss, if the loss rose by `worse`.

    Updates must be at least `large`.
    """
    rate_T, loss_T = history.scalar("lr.0", JUMP_WINDOW_STEPS), history.scalar("loss", JUMP_WINDOW_STEPS)
    if len(loss_T) < 4 * BLOCK_STEPS:
        return None
    rate_B, loss_B = block_medians(rate_T, BLOCK_STEPS), block_medians(loss_T, BLOCK_STEPS)
    # the newest two blocks must both be worse than the best block before them
    best = int(np.argmin(loss_B[:-2]))
    rate, lowest, usual = float(rate_T[-1]), float(loss_B[best]), float(rate_B[: best + 1].max())
    has_risen = rate_B[-1] >= jump * usual > 0
    is_worse = loss_B[-2:].min() >= worse * lowest > 0
    if not is_worse or not has_risen or _was_reached_before(history, 0, rate, jump):
        return None
    ratio_TW = history.param.window("update.ratio", JUMP_WINDOW_STEPS)[:, structure_of(history).rate_weights.indices_W]
    ratio = float(np.fmax.reduce(median(ratio_TW.T)))
    if not ratio >= large:
        return None
    return Sign(
        f"the learning rate has risen {format_factor(rate / usual)}-fold since the lowest loss, "
        "and the loss rises again",
        (
            Quantity(key="lr.0", value=rate),
            Quantity(key="lr.usual", label="largest lr.0 until the lowest loss", value=usual),
            Quantity(key="loss.lowest", label="lowest loss (median of 6 steps)", value=lowest),
            Quantity(key="loss.median", label="loss (median of 6 steps)", value=float(loss_B[-1])),
            Quantity(key="update.ratio.largest_median", label="largest median update.ratio of 64 steps", value=ratio),
        ),
    )


def _was_reached_before(history: History, group: int, rate: float, jump: float) -> bool:
    """Return whether the rate was nearly as high before the window, as with warm restarts."""
    earlier_T = history[f"lr.{group}"][:-JUMP_WINDOW_STEPS]
    return len(earlier_T) > 0 and rate < jump * float(np.fmax.reduce(earlier_T))
