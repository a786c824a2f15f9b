"""Find a loss that large updates have thrown far above its start, for several steps, at any time of the run."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

MEDIAN_STEPS = 8
"""Newest steps of the median loss: more than single bad batches."""


def find_overshot_loss(history: History, *, runaway: float, large: float) -> Sign | None:
    """Return the sign of losses at `runaway` times the first, if an update of the window was at least `large`.

    Args:
        history: History of the run.
        runaway: Median of the newest losses, in units of the first loss.
        large: Update/weight ratio, as the median over matrices.
    """
    first, loss_T = float(first_steps(history, "loss", 1)[0]), history.scalar("loss")
    if len(loss_T) < MEDIAN_STEPS or not loss_T[-1] >= runaway * first > 0:
        return None
    # nan and Inf sort last, so the lower median ignores a few of them
    newest = float(np.sort(loss_T[-MEDIAN_STEPS:])[MEDIAN_STEPS // 2 - 1])
    ratio_TW = history.param.window("update.ratio")[:, structure_of(history).rate_weights.indices_W]
    ratio_T = np.sort(ratio_TW, axis=1)[:, (ratio_TW.shape[1] - 1) // 2]
    largest = float(np.fmax.reduce(ratio_T, initial=-np.inf))
    if not runaway * first <= newest < np.inf or not largest >= large:
        return None
    rate = float(history.run.newest("lr.0")[0])
    return Sign(
        f"the loss has risen to {format_factor(newest / first)} times the first, at a learning rate of {rate:g}",
        (
            Quantity(key="loss.by_first", label="loss / first loss", value=newest / first),
            Quantity(key="update.ratio.largest", label="largest median update.ratio", value=largest),
            Quantity(key="lr.0", value=rate),
        ),
        since=int(history.run.steps()[np.argmax(loss_T >= runaway * first)]),
    )
