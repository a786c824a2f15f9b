"""Find batches of two alternating sources, one of which drowns the other.

The gradient norms have two levels that alternate every second to fourth step. A rank sum shows whether the levels are
further apart than in a random order. The source with the small gradients is drowned if it learns nothing: its loss
stays at its start, or grows because the other source undoes what it taught.

Wrong for two alternating tasks if their losses differ that much and stay as high as at the start. Tasks with separate
layers are recognized, unless the gap between the norms is so large that one learning rate cannot serve both.
"""

# T = steps of a window, K = phases of all periods

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import BASELINE_STEPS, first_steps
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, looks_in_window, window_number
from gradwatch.detect.gradients.oscillating_gradient_rules.window import NORM, WINDOW_STEPS
from gradwatch.history.store import History
from gradwatch.records import Quantity

PERIODS_STEPS = (2, 3, 4)
"""Steps after which the same source comes again."""

FIRST_BATCHES = 3
"""Batches of each kind that give the start of their loss if the gap is small, before the other kind has raised it."""


class SourcePair(NamedTuple):
    """A number for the batches with small gradients, and one for the other batches."""

    quiet: float
    loud: float


class Alternation(NamedTuple):
    """Two levels of norms that take turns.

    Attributes:
        period: Steps after which the rarer level comes again.
        is_quiet_T: Whether the norm of a step is of the lower level, of shape (WINDOW_STEPS,).
        gap: Distance of the levels, in powers of ten.
    """

    period: int
    is_quiet_T: NDArray[np.bool_]
    gap: float


class RankSums(NamedTuple):
    """Rank sums of the norms in each phase, of shape (K,).

    Attributes:
        chance_K: Probability of a sum as far from its mean, on its side, if the batches come in random order.
        is_low_K: Whether the sum is below its mean.
    """

    chance_K: Floats
    is_low_K: NDArray[np.bool_]


PHASES = tuple((period, phase) for period in PERIODS_STEPS for phase in range(period))
"""Periods with their phases: a phase is the number of steps from the last batch of a source to the newest batch."""

_IS_IN_PHASE_TK = np.array([np.arange(WINDOW_STEPS)[::-1] % period == phase for period, phase in PHASES]).T


def find_drowned_source(
    history: History,
    *,
    every: int,
    decades: float,
    drowned_decades: float,
    unlearned_frac: float,
    unlearning: float,
    task_ratio: float,
) -> Sign | None:
    """Return a sign if the batches of one alternating source drown the batches of another.

    Args:
        history: History of the run.
        every: Steps between two calls.
        decades: Gap between the two levels of norms, in powers of ten, at which they count as sources of other scales.
        drowned_decades: Gap at which one rate cannot serve both sources, be they separate tasks or not.
        unlearned_frac: Fraction of the first loss of the quiet batches above which they are not learned.
        unlearning: Growth of the loss of the quiet batches at which the other batches unteach it.
        task_ratio: Loss of the loud batches over the loss of the quiet ones, from which they are different tasks.
    """
    # several optimizers, as in a GAN, alternate on purpose
    if "+" in history.info.optimizer:
        return None
    alternation = _alternation(history, every=every)
    if alternation is None:
        return None
    period, is_quiet_T, gap = alternation
    loss_T = history.scalar("loss", WINDOW_STEPS)
    loss = SourcePair(float(median(loss_T[is_quiet_T])), float(median(loss_T[~is_quiet_T])))
    first = _first_losses(history, is_quiet_T, period, BASELINE_STEPS if gap >= decades else FIRST_BATCHES)
    if not loss.quiet > unlearned_frac * first.quiet > 0:
        return None
    are_the_same = _move_the_same_tensors(history, is_quiet_T)
    if gap >= decades:
        is_as_high = loss.quiet > loss.loud / task_ratio or loss.quiet > unlearning * first.quiet
        is_drowned = gap >= drowned_decades or (are_the_same and is_as_high)
    else:
        is_drowned = are_the_same and loss.quiet / first.quiet > unlearning * max(1, loss.loud / first.loud)
    if not is_drowned:
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


def _alternation(history: History, *, every: int) -> Alternation | None:
    """Return the two levels between which the norms alternate, or None if they may come in random order."""
    norm_T = history.scalar(NORM, WINDOW_STEPS)
    sums = rank_sum_by_phase(norm_T)
    among = 2 * len(PHASES) * looks_in_window(every)  # 2: both sides
    error = allowed_error(SequentialTest.ALTERNATING_SOURCES, window_number(history), among=among)
    if sums.chance_K.min() > error:
        return None
    log_T = log10(norm_T)
    if np.isnan(log_T).any():
        return None
    found = [k for k in np.argsort(sums.chance_K).tolist() if sums.chance_K[k] <= error]
    # a period of 2 also shows at 4: the shortest period explains both
    k = min(found, key=lambda k: PHASES[k][0])
    period, phase = PHASES[k]
    is_quiet_T = (np.arange(WINDOW_STEPS)[::-1] % period == phase) == sums.is_low_K[k]
    return Alternation(period, is_quiet_T, float(median(log_T[~is_quiet_T]) - median(log_T[is_quiet_T])))


def rank_sum_by_phase(values_T: Floats) -> RankSums:
    """Return how far the values of each phase lie above or below all others, in the order of `PHASES`.

    This is Wilcoxon's rank sum, with its exact distribution. It holds for values of any distribution, and a trend adds
    little, since each phase is spread over the whole window.

    Args:
        values_T: Values of successive steps, of shape (WINDOW_STEPS,), without nan.
    """
    # sorting twice gives ranks
    sum_K = values_T.argsort().argsort() @ _IS_IN_PHASE_TK
    count_K = _IS_IN_PHASE_TK.sum(axis=0)
    mirrored_K = (WINDOW_STEPS - 1) * count_K - sum_K  # the sum of the ranks from above
    further_K = np.maximum(sum_K, mirrored_K).tolist()
    chance_K = np.array([_upper_tail(count)[far] for count, far in zip(count_K.tolist(), further_K, strict=True)])
    return RankSums(chance_K, sum_K < mirrored_K)


@functools.cache
def _upper_tail(count: int) -> Floats:
    """Return the probability that `count` ranks of a window, at random, have a sum of s or more, for s from 0 on."""
    highest = sum(range(WINDOW_STEPS - count, WINDOW_STEPS))
    ways_CS = np.zeros((count + 1, highest + 1))  # ways to choose C ranks with the sum S
    ways_CS[0, 0] = 1
    for rank in range(WINDOW_STEPS):
        ways_CS[1:, rank:] += ways_CS[:-1, : highest + 1 - rank].copy()
    tail_S: Floats = np.cumsum(ways_CS[count, ::-1])[::-1] / math.comb(WINDOW_STEPS, count)
    return tail_S


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
