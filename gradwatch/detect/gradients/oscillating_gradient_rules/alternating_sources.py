"""Find batches of two alternating sources, one of which drowns the other.

The gradient norms have two levels that alternate every second to fourth step. A rank sum shows whether the levels are
further apart than random batches are. The source with the small gradients is drowned if it learns nothing: its loss
stays at its start, or grows because the other source unteaches it.

Wrong for two alternating tasks if their losses differ that much and stay as high as at the start. Tasks with separate
layers are recognized, unless the gap between the norms is so large that one learning rate cannot serve both.
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
"""Steps after which the same source comes again."""

MIN_RANK_SUM_SIGMAS = 5.0
"""Standard deviations of a rank sum that do not occur by chance: with 2 + 3 + 4 phases to choose from, one window in
200,000 of random batches has as much."""

FIRST_BATCHES = 3
"""Batches of each kind that give the start of their loss if the gap is small, before the other kind has raised it."""

UNLEARNING_GROWTH = 3.0
"""Growth of the loss of one kind of batches at which the other kind unteaches it."""

MAX_LOSS_RATIO = 3.0
"""Loss of the loud batches over the loss of the quiet batches, above which they are different tasks."""

DROWNED_DECADES = 2.5
"""Gap between two alternating tasks at which one rate cannot serve both; see `layer-imbalance`."""

DROWNED_LATE_DECADES = 2.0
"""Same gap for a task that is still unlearned after `PATIENCE_STEPS`: the other task makes 99 % of its updates."""


class SourcePair(NamedTuple):
    """A number for the batches with small gradients, and one for the other batches."""

    quiet: float
    loud: float


def _list_phases() -> tuple[tuple[tuple[int, int], ...], Floats]:
    """Return each period with each of its phases, and the weights of a window's ranks for each."""
    phases = tuple((period, phase) for period in PERIODS_STEPS for phase in range(period))
    is_TK = np.array([np.arange(WINDOW_STEPS)[::-1] % period == phase for period, phase in phases]).T
    count_K = is_TK.sum(axis=0)
    return phases, is_TK / np.sqrt(count_K * (WINDOW_STEPS - count_K) * (WINDOW_STEPS + 1) / 12)


PHASES, _WEIGHT_TK = _list_phases()
"""Periods with their phases: a phase is the number of steps from the last batch of a source to the newest batch."""


def find_drowned_source(history: History, *, decades: float) -> Sign | None:
    """Return a sign if the batches of one alternating source drown the batches of another.

    Args:
        history: History of the run.
        decades: Gap between the two levels of norms, in powers of ten, at which they count as sources of other scales.
    """
    # several optimizers, as in a GAN, alternate on purpose
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
    # a period of 2 also shows at 4: the shortest period explains both
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

    This is Wilcoxon's rank sum, which holds for any distribution and for values with a trend.

    Args:
        values_T: Values of successive steps, of shape (WINDOW_STEPS,), without nan.

    Returns:
        Deviations of shape (K,), in the order of `PHASES`.
    """
    # sorting twice gives ranks
    rank_T = values_T.argsort().argsort() - (WINDOW_STEPS - 1) / 2
    sigmas_K: Floats = rank_T @ _WEIGHT_TK
    return sigmas_K


def _is_drowned(
    history: History, is_quiet_T: NDArray[np.bool_], *, gap: float, decades: float, loss: SourcePair, first: SourcePair
) -> bool:
    """Return whether the batches with small gradients teach nothing because of the other batches."""
    if not loss.quiet > UNLEARNED_FRAC * first.quiet > 0:
        return False
    are_the_same = _move_the_same_tensors(history, is_quiet_T)
    if gap >= decades:
        drowned_decades = DROWNED_DECADES if history.step < PATIENCE_STEPS else DROWNED_LATE_DECADES
        is_as_high = loss.quiet > loss.loud / MAX_LOSS_RATIO or loss.quiet > UNLEARNING_GROWTH * first.quiet
        return gap >= drowned_decades or (are_the_same and is_as_high)
    return are_the_same and loss.quiet / first.quiet > UNLEARNING_GROWTH * max(1, loss.loud / first.loud)


def _first_losses(history: History, is_quiet_T: NDArray[np.bool_], period: int, most: int) -> SourcePair:
    """Return the median loss of the first `most` batches with small gradients, and of the first `most` others."""
    first_T = first_steps(history, "loss")
    is_quiet_at = {(history.step - age) % period: bool(is_quiet_T[-1 - age]) for age in range(period)}
    steps = history.run.kept_steps()[: len(first_T)].tolist()
    was_quiet_T = np.array([is_quiet_at[step % period] for step in steps])
    return SourcePair(float(median(first_T[was_quiet_T][:most])), float(median(first_T[~was_quiet_T][:most])))


def _move_the_same_tensors(history: History, is_quiet_T: NDArray[np.bool_]) -> bool:
    """Return whether both kinds of batches give gradients to the same tensors: no separate tasks."""
    moves_TL = history.param.window("grad.l2", WINDOW_STEPS) > 0
    return bool((moves_TL[is_quiet_T].any(axis=0) == moves_TL[~is_quiet_T].any(axis=0)).all())
