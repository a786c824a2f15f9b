"""Find batches of two sources in turn, one of which drowns the other.

The gradient norms are of two kinds that come every second to fourth step. A rank sum says whether the kinds are
further apart than random batches are. The source with the small gradients is drowned if it learns nothing: its loss is
still what it was, or it grows because the other source unteaches it.

Wrong for two tasks in turn whose losses differ that much and stay as high as in the beginning. Tasks with layers of
their own are recognised, unless the gap between the norms is so large that one learning rate cannot serve both.
"""

# T = steps of a window, K = phases of all periods

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import BASELINE_STEPS, first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.gradients.oscillating_gradient_rules.window import (
    NORM,
    PATIENCE_STEPS,
    UNLEARNED_FRAC,
    WINDOW_STEPS,
)
from gradwatch.history.store import History
from gradwatch.records import Quantity

PERIODS_STEPS = (2, 3, 4)
"""Steps after which the same source has its turn again."""

MIN_RANK_SUM_SIGMAS = 5.0
"""Standard deviations of a rank sum that do not happen by chance: with 2 + 3 + 4 phases to choose from, one window in
200,000 of random batches has as much."""

FIRST_BATCHES = 3
"""Batches of each kind that say where their loss began if the gap is small, before the others have spoilt it."""

UNLEARNING_GROWTH = 3.0
"""Growth of the loss of one kind of batches at which the other kind unteaches it."""

MAX_LOSS_RATIO = 3.0
"""Loss of the loud batches, in units of the loss of the quiet ones, beyond which they are different tasks."""

DROWNED_DECADES = 2.5
"""Gap between two tasks in turn at which one rate cannot serve both; see `layer-imbalance`."""

DROWNED_LATE_DECADES = 2.0
"""The same for a task that is still unlearned after `PATIENCE_STEPS`: 99 % of what moves its layers is the other's."""


class SourcePair(NamedTuple):
    """A number of the batches with small gradients, and of the others."""

    quiet: float
    loud: float


def _list_phases() -> tuple[tuple[tuple[int, int], ...], Floats]:
    """Return each period with each of its phases, and the weights of the ranks of a window for each."""
    phases = tuple((period, phase) for period in PERIODS_STEPS for phase in range(period))
    is_TK = np.array([np.arange(WINDOW_STEPS)[::-1] % period == phase for period, phase in phases]).T
    count_K = is_TK.sum(axis=0)
    return phases, is_TK / np.sqrt(count_K * (WINDOW_STEPS - count_K) * (WINDOW_STEPS + 1) / 12)


PHASES, _WEIGHT_TK = _list_phases()
"""Periods with their phases: how many steps before the newest one a source had its turn."""


def find_drowned_source(history: History, *, decades: float) -> Sign | None:
    """Return a sign if the batches of one source in turn drown the batches of another.

    Args:
        history: Of the run.
        decades: Gap between the two kinds of norms, in powers of ten, at which they count as sources of other scales.
    """
    if "+" in history.info.optimizer:
        return None
    norm_T = history.scalar(NORM, WINDOW_STEPS)
    sigmas_K = rank_sum_by_phase(norm_T)
    if np.abs(sigmas_K).max() < MIN_RANK_SUM_SIGMAS:
        return None
    log_T = log10(norm_T)
    if np.isnan(log_T).any():
        return None
    found = [k for k in np.argsort(-np.abs(sigmas_K)).tolist() if abs(sigmas_K[k]) >= MIN_RANK_SUM_SIGMAS]
    k = min(found, key=lambda k: PHASES[k][0])
    period, phase = PHASES[k]
    is_quiet_T = (np.arange(WINDOW_STEPS)[::-1] % period == phase) == (sigmas_K[k] < 0)
    gap = float(median(log_T[~is_quiet_T]) - median(log_T[is_quiet_T]))
    loss_T = history.scalar("loss", WINDOW_STEPS)
    loss = SourcePair(float(median(loss_T[is_quiet_T])), float(median(loss_T[~is_quiet_T])))
    first = _first_losses(history, is_quiet_T, period, BASELINE_STEPS if gap >= decades else FIRST_BATCHES)
    if not _is_drowned(history, is_quiet_T, gap=gap, decades=decades, loss=loss, first=first):
        return None
    return Sign(
        f"gradient norms alternate between two levels, {10**gap:.3g}x apart: one every {period} steps, "
        "and the batches with small gradients are not learned",
        (
            Quantity(
                key="sources.gap_decades",
                label="median norm of one level / the other",
                value=gap,
                unit="orders of magnitude",
            ),
            Quantity(key="period", value=float(period), unit="steps"),
            Quantity(key="sources.quiet_loss", label="loss of the batches with small gradients", value=loss.quiet),
            Quantity(key="sources.quiet_loss_first", label="loss of these batches at the start", value=first.quiet),
        ),
    )


def rank_sum_by_phase(values_T: Floats) -> Floats:
    """Return how far the values of each phase lie above or below all others, in standard deviations.

    It is Wilcoxon's rank sum, which holds for any distribution and for values with a trend.

    Args:
        values_T: Values of successive steps, of shape (WINDOW_STEPS,), without nan.

    Returns:
        Deviations of shape (K,), in the order of `PHASES`.
    """
    rank_T = values_T.argsort().argsort() - (WINDOW_STEPS - 1) / 2
    sigmas_K: Floats = rank_T @ _WEIGHT_TK
    return sigmas_K


def _is_drowned(
    history: History, is_quiet_T: NDArray[np.bool_], *, gap: float, decades: float, loss: SourcePair, first: SourcePair
) -> bool:
    """Return whether nothing is learned from the batches with small gradients because of the others."""
    if not loss.quiet > UNLEARNED_FRAC * first.quiet > 0:
        return False
    are_the_same = _move_the_same_tensors(history, is_quiet_T)
    if gap >= decades:
        drowned_decades = DROWNED_DECADES if history.step < PATIENCE_STEPS else DROWNED_LATE_DECADES
        is_as_high = loss.quiet > loss.loud / MAX_LOSS_RATIO or loss.quiet > UNLEARNING_GROWTH * first.quiet
        return gap >= drowned_decades or (are_the_same and is_as_high)
    return are_the_same and loss.quiet / first.quiet > UNLEARNING_GROWTH * max(1, loss.loud / first.loud)


def _first_losses(history: History, is_quiet_T: NDArray[np.bool_], period: int, most: int) -> SourcePair:
    """Return the median loss of the first batches with small gradients, at most `most` of them, and of the others."""
    first_T = first_steps(history, "loss")
    is_quiet_at = {(history.step - age) % period: bool(is_quiet_T[-1 - age]) for age in range(period)}
    steps = history.run.kept_steps()[: len(first_T)].tolist()
    was_quiet_T = np.array([is_quiet_at[step % period] for step in steps])
    return SourcePair(float(median(first_T[was_quiet_T][:most])), float(median(first_T[~was_quiet_T][:most])))


def _move_the_same_tensors(history: History, is_quiet_T: NDArray[np.bool_]) -> bool:
    """Return whether each tensor with a gradient from one kind of batches has one from the other: no separate tasks."""
    moves_TL = history.param.window("grad.l2", WINDOW_STEPS) > 0
    return bool((moves_TL[is_quiet_T].any(axis=0) == moves_TL[~is_quiet_T].any(axis=0)).all())
