"""A learning rate that has risen beyond all that it was, in a jump or step by step, and a loss that rises with it."""

# T = steps of a window, B = blocks of them, W = weight matrices and kernels

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS, last_jump
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

AFTER = 6
"""Steps before and after a jump of the rate that show what the loss does. (The start of a warm-up is no jump.)"""


def jumped(history: History, *, jump: float, worse: float) -> Sign | None:
    """Return that the rate of a group has risen at once, and the loss after it."""
    for group in range(history.groups):
        rate_T = history.scalar(f"lr.{group}", JUMP_WINDOW_STEPS)
        at = last_jump(rate_T, jump) or 0
        if not AFTER <= at <= len(rate_T) - AFTER or _had(history, group, rate_T[at], jump):
            continue
        highest = float(np.fmax.reduce(rate_T[:at]))
        loss_T = history.scalar("loss", JUMP_WINDOW_STEPS)
        before, after = float(median(loss_T[max(0, at - AFTER) : at])), float(median(loss_T[at + 1 :]))
        if after <= worse * before:
            continue
        return Sign(
            f"the learning rate rose {format_factor(rate_T[at] / highest)} times, and the loss with it",
            (
                Quantity(
                    key="lr.jump_step", label="jump at step", value=float(history.run.steps(JUMP_WINDOW_STEPS)[at])
                ),
                Quantity(key="lr.before", label=f"lr.{group} before", value=highest),
                Quantity(key="lr.after", label=f"lr.{group} after", value=float(rate_T[at])),
                Quantity(key="loss.before", label="loss before", value=before),
                Quantity(key="loss.after", label="loss after", value=after),
            ),
        )
    return None


def outgrown(history: History, *, jump: float, worse: float, large: float) -> Sign | None:
    """Return that the rate rises step by step beyond all that it was, and the loss since it was lowest with it."""
    rate_T, loss_T = history.scalar("lr.0", JUMP_WINDOW_STEPS), history.scalar("loss", JUMP_WINDOW_STEPS)
    if len(loss_T) < 4 * AFTER:
        return None
    rate_B, loss_B = block_medians(rate_T, AFTER), block_medians(loss_T, AFTER)
    best = int(np.argmin(loss_B[:-2]))
    rate, low, usual = float(rate_T[-1]), float(loss_B[best]), float(rate_B[: best + 1].max())
    has_risen = rate_B[-1] >= jump * usual > 0
    if not loss_B[-2:].min() >= worse * low > 0 or not has_risen or _had(history, 0, rate, jump):
        return None
    ratio_TW = history.param.window("update.ratio", JUMP_WINDOW_STEPS)[:, structure_of(history).rate_weights.indices_W]
    ratio = float(np.fmax.reduce(median(ratio_TW.T)))
    if not ratio >= large:
        return None
    return Sign(
        f"the learning rate has risen {format_factor(rate / usual)} times since the loss was lowest, "
        "and the loss with it",
        (
            Quantity(key="lr.0", value=rate),
            Quantity(key="lr.usual", label="lr.0 until the loss was lowest, at most", value=usual),
            Quantity(key="loss.lowest", label="lowest loss, median of 6", value=low),
            Quantity(key="loss.median", label="loss, median of 6", value=float(loss_B[-1])),
            Quantity(key="update.ratio.largest_median", label="update.ratio, median, largest of 64 steps", value=ratio),
        ),
    )


def _had(history: History, group: int, rate: float, jump: float) -> bool:
    """Say whether the rate was nearly as high in the part of the run that the window does not show."""
    earlier_T = history[f"lr.{group}"][:-JUMP_WINDOW_STEPS]
    return len(earlier_T) > 0 and rate < jump * float(np.fmax.reduce(earlier_T))
