"""Find a run from scratch whose weights have hardly moved in many steps, and whose loss has hardly fallen.

Each update may be as large as in a careful fine-tuning, and so is not negligible by itself. A model from scratch needs
to go further: as long as its weights are nearly those of the start, so is most of what it computes. Its loss falls
along a straight line, if the noise of the batches shows that at all.

A model from scratch is recognized by its weights. An initializer draws all matrices by one rule, so most of them agree
in their size, by the number of inputs or as they are. Training makes them differ. A model that was trained before may
need no more than such updates, so it is not judged.
"""

# T = measured steps of the run, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import baseline_loss, first_measured, newest_loss
from gradwatch.detect.features.events import measures_success
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.learning_rate_too_low_rules.negligible_updates import small_update_evidence
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import level_of, may_learn
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

LOSS_STEPS = 32
"""Newest steps of the median loss."""

TRAVEL = "update.travel"


def find_short_travel(
    history: History, *, travel: float, spread: float, fall: float, patience: int, alike: float
) -> Sign | None:
    """Return a sign if all updates so far together were small, and the loss has hardly fallen.

    Args:
        history: History of the run.
        travel: Sum of the update/weight ratios of all steps below which the weights have hardly moved.
        spread: Ratio of the largest update to the median up to which all layers move alike.
        fall: Fall of the loss since the start, as a fraction, below which it has hardly fallen.
        patience: Minimum number of steps.
        alike: Distance of the sizes of two matrices, as a fraction, up to which one rule drew both.
    """
    indices_W = structure_of(history).rate_weights.indices_W
    # cheap: half of the matrices cannot have moved by more, and False for nan, since most steps measure no updates
    newest_W = history.param.newest("update.ratio")[indices_W]
    if history.step < patience or not (newest_W * patience < travel).any() or has_fallen(history, fall=fall):
        return None
    rate_T = history.scalar("lr.0")
    is_held_back = rate_T[-1] > rate_T[0] or (history.scalar("skipped") == 1).any()
    if is_held_back or not may_learn(history) or not _is_from_scratch(history, alike=alike):
        return None
    steps_T, ratio_TL = history.param.series("update.ratio")
    _, zero_frac_TL = history.param.series("grad.zero_frac")
    level_T = level_of(history, ratio_TL[:, indices_W], zero_frac_TL[:, indices_W], spread=spread)
    is_known_T = ~np.isnan(level_T)
    # each measured update stands for the steps up to the next
    moved = float(level_T[is_known_T] @ np.diff(steps_T[is_known_T], append=history.step + 1))
    if not 0 < moved < travel:
        return None
    first, where = baseline_loss(history)
    return Sign(
        f"in {history.step} steps the weights have moved by at most {100 * moved:.1g} %, and the loss is "
        f"{newest_loss(history, LOSS_STEPS):.4g}; it was {first:.4g} {where}",
        (
            Quantity(key=TRAVEL, label="sum of all update.ratio, median", value=moved),
            *small_update_evidence(history, float(level_T[is_known_T][-1])),
        ),
        since=int(history.steps("loss")[0]),
        severity=None if measures_success(history) else Severity.INFO,
    )


def has_fallen(history: History, *, fall: float) -> bool:
    """Return whether the loss has fallen by a fraction since the start, or cannot."""
    first = baseline_loss(history)[0]
    return not newest_loss(history, LOSS_STEPS) > (1 - fall) * first > 0


def _is_from_scratch(history: History, *, alike: float) -> bool:
    """Return whether most weights began at one size, by their number of inputs or as they are."""
    structure = structure_of(history)
    indices_W = structure.rate_weights.indices_W
    rms_W: Floats = first_measured(history, "weight.l2")[indices_W] / structure.rms_scale_L[indices_W]
    inputs_W = np.array([np.prod(history.info.layers[i].shape[1:]) for i in indices_W])
    return any(
        2 * np.count_nonzero(np.abs(size_W - median(size_W)) <= alike * median(size_W)) > len(size_W)
        for size_W in (rms_W, rms_W * np.sqrt(inputs_W))
    )
