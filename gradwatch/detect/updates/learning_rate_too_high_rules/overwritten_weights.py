"""Find a single harmful update that is larger than the weights it moves."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_overwritten_weights(
    history: History, *, ratio: float, every: int, harm: float, harm_steps: int, harm_alone: float
) -> Sign | None:
    """Return the sign of a harmful update of the last `every` steps, at least `ratio` times its weights.

    Args:
        history: History of the run.
        ratio: Update/weight ratio at which to report.
        every: Newest steps whose updates are judged.
        harm: Loss after the update, in units of the loss before it, from which the update did harm.
        harm_steps: Steps after the update that the median loss needs to show harm.
        harm_alone: Size of the update, in units of `ratio`, that does harm whatever the loss does.
    """
    # cheap: no tensor had such an update
    if not np.fmax.reduce(history.param.window("update.ratio", every + 1), axis=None) >= ratio:
        return None
    structure, age = structure_of(history), min(every + 1, len(history.param.steps(every + 1)))
    ratio_TW = history.param.window("update.ratio", age)[:, structure.rate_weights.indices_W]
    is_over_T = 2 * np.count_nonzero(ratio_TW >= ratio, axis=1) >= len(structure.rate_weights.indices_W)
    if not is_over_T.any():
        return None
    at = int(np.argmax(is_over_T))
    gain_W = (
        history.param.window("weight.l2", age)[at, structure.rate_weights.indices_W]
        / structure.rate_weights.unit_norm_W
    )
    largest = float(median(np.where(gain_W > NEAR_ZERO_GAIN, ratio_TW[at], np.nan)))
    loss_T = history.scalar("loss", age)
    # abs: the factor must raise a negative loss too
    harmful_loss = loss_T[at] + (harm - 1) * abs(loss_T[at])
    # `not <`: a nan loss counts as worse
    is_worse = age - at > harm_steps and not float(median(loss_T[at + 1 :])) < harmful_loss
    if not ratio <= largest < np.inf or not (is_worse or largest >= harm_alone * ratio):
        return None
    rate = float(history.run.newest("lr.0")[0])
    return Sign(
        f"one update at a learning rate of {rate:g} is {format_factor(largest)} times as large as the weights it moves",
        (
            Quantity(key="update.ratio.median", label="median update.ratio", value=largest),
            Quantity(key="lr.0", value=rate),
        ),
        since=int(history.param.steps(age)[at]),
    )
