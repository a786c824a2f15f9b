"""Find norms that climb exponentially: norm and loss exceed all values of the first half of the window.

The loss has to climb too, because norms also rise at the end of a plateau while the loss falls. A curriculum that gets
harder raises both, but by less. A loss that is the value of a game may rise for good reasons. A loop that moves on to
other data raises both in one step, and then they fall.
"""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import is_consequence
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS, last_jump
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.robust_stats import Floats, block_medians, median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

NORM = "grad_norm.before_clip"

BLOCK_STEPS = 8
"""Steps per block median: up to three wild batches do not make a climb."""


def find_climb(
    history: History,
    norm_T: Floats,
    *,
    kind: str,
    factor: float,
    loss_factor: float,
    blocks: int,
    rate_jump: float,
) -> Iterator[Sign]:
    """Yield a sign for the run, or for each module that climbs while others do not.

    Args:
        history: History of the run.
        norm_T: Total gradient norms of the newest steps.
        kind: Kind of the resulting findings.
        factor: Climb of the norm over the largest block median of the first half of the window.
        loss_factor: Same factor for the loss, which must also exceed its first steps by it.
        blocks: Minimum number of blocks, the newest included.
        rate_jump: Rise of the learning rate above its earlier values, as a factor, that explains a climb.
    """
    if len(norm_T) < max(blocks, 2) * BLOCK_STEPS:  # a block in the first half
        return
    half = len(norm_T) // 2
    # nan and Inf sort last, so the lower median ignores a few of them
    newest = float(np.sort(norm_T[-BLOCK_STEPS:])[BLOCK_STEPS // 2 - 1])
    if not newest > factor * np.fmin.reduce(norm_T[:half]):  # cheap: above the smallest
        return
    before = float(np.fmax.reduce(block_medians(norm_T[:half], BLOCK_STEPS)))
    if not newest >= factor * before or not _is_loss_rising(history, half, loss_factor=loss_factor):
        return
    l2_TL = history.param.window("grad.l2")
    with np.errstate(divide="ignore", invalid="ignore"):
        affected_L = median(l2_TL[-BLOCK_STEPS:]) >= factor * median(l2_TL[:half])
    # if most tensors climb, the run climbs
    is_whole = 2 * np.count_nonzero(affected_L) >= structure_of(history).num_trainable
    severity = Severity.INFO if _is_known(history, kind, rate_jump=rate_jump) else Severity.CRITICAL
    for layer, _ in [(None, [])] if is_whole else affected_modules(history, affected_L, kind=kind):
        whose = f" of {layer}" if layer else ""
        yield Sign(
            f"the gradient norm{whose} has grown {format_factor(newest / before)}-fold, and the loss is rising too",
            (
                Quantity(key="grad_norm.climb", label="growth of grad_norm.before_clip", value=newest / before),
                Quantity(key=NORM, value=float(norm_T[-1])),
                Quantity(key="loss", value=float(history.run.newest("loss")[0])),
            ),
            since=start_of_state(norm_T > before, history.run.steps()),
            layer=layer,
            severity=severity,
        )


def _is_loss_rising(history: History, half: int, *, loss_factor: float) -> bool:
    """Return whether the loss is far above the first half of the window and above its start."""
    loss_T = history.scalar("loss")
    newest, past = float(median(loss_T[-BLOCK_STEPS:])), block_medians(loss_T[:half], BLOCK_STEPS)
    low, high = float(np.fmin.reduce(past)), float(np.fmax.reduce(past))
    first = float(np.fmax.reduce(first_steps(history, "loss", BLOCK_STEPS)))
    if low <= 0:  # a loss around zero has no factor: it must rise as far above the past as the past is wide
        return newest > high + (loss_factor - 1) * (high - low) and newest > first
    return newest > loss_factor * max(high, first) and not _is_new_stage(loss_T, high, loss_factor=loss_factor)


def _is_new_stage(loss_T: Floats, high: float, *, loss_factor: float) -> bool:
    """Return whether all of the rise came in one step, and the loss has not risen since: growth takes several steps."""
    past_T = np.flatnonzero(loss_T <= high)
    if not past_T.size or past_T[-1] + 2 >= len(loss_T):  # too few steps to tell
        return False
    risen_T = loss_T[past_T[-1] + 1 :]
    return bool(risen_T[0] > loss_factor * loss_T[past_T[-1]] and median(risen_T[1:]) <= risen_T[0])


def _is_known(history: History, kind: str, *, rate_jump: float) -> bool:
    """Return whether the climb is only for information: reported as such before, or explained."""
    was_for_information = any(f.kind == kind and f.severity == Severity.INFO for f in history.findings)
    has_jumped = last_jump(history.scalar("lr.0", JUMP_WINDOW_STEPS), rate_jump) is not None
    return was_for_information or has_jumped or is_consequence(history, kind)
