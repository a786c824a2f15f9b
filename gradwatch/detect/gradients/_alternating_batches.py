"""Two kinds of batches that come in turn, a stretch of each: the loss jumps at each change, gradients turn about."""

# T = steps of a window, L = parameter tensors, P = stretches, D = windows,
# K = turns

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import History

Pair = tuple[float, float]
"""A number of the batches with small gradients, and one of the others."""

LENGTH = 48
"""Steps of the window: four waves of a dozen steps, and few enough for an early word."""

STRETCHES = 4
"""Jumps in equal distances at which it is no chance any more."""

LONGEST = 24
"""Steps of the longest stretch: longer ones are tasks of their own, as in continual learning."""

PERIODS = (2, 3, 4)
"""Steps after which the same source has its turn again."""

NO_CHANCE = 5.0
"""Standard deviations of a rank sum beyond which two kinds in turn are no chance: with 2 + 3 + 4 turns to choose from
one window in 200,000 without kinds has as much."""

SHORTEST = 3
"""Steps of the shortest one within which a loss falls and is seen to."""


ROUNDS = (2, 3, 4, 6)
"""The same for sources that contradict each other: two or three, or two with two or three batches each."""

MOST = 64
"""Tensors at most that are looked at for contradictions, evenly spread over the model."""


def _turns() -> tuple[tuple[tuple[int, int], ...], Floats]:
    """Return each period with each of its turns, and what to weight the ranks of a window with for each."""
    turns = tuple((period, turn) for period in PERIODS for turn in range(period))
    is_TK = np.array([np.arange(LENGTH)[::-1] % period == turn for period, turn in turns]).T
    count_K = is_TK.sum(axis=0)
    return turns, is_TK / np.sqrt(count_K * (LENGTH - count_K) * (LENGTH + 1) / 12)


TURNS, _WEIGHT_TK = _turns()
"""Periods, and steps before the newest at which a turn of theirs lies."""


def apart(values_DT: Floats) -> Floats:
    """Return how far the values of each turn lie above or below all others.

    Wilcoxon's rank sum, in its standard deviations: whatever the values' distribution, and their trend over a window.

    Args:
        values_DT: Values of successive steps, of shape (D, LENGTH), without nan.

    Returns:
        Deviations of shape (D, K), in the order of `TURNS`.
    """
    rank_DT = values_DT.argsort(axis=1).argsort(axis=1) - (LENGTH - 1) / 2
    far_DK: Floats = rank_DT @ _WEIGHT_TK
    return far_DK


def first_losses(history: History, is_quiet_T: NDArray[np.bool_], period: int, most: int) -> Pair:
    """Return the median of the first losses of the batches with small gradients, at most so many, and of the others."""
    first_T = beginning(history, "loss")
    of_turn = {(history.step - age) % period: bool(is_quiet_T[-1 - age]) for age in range(period)}
    was_quiet_T = np.array([of_turn[step % period] for step in history.run.kept_steps()[: len(first_T)].tolist()])
    return float(median(first_T[was_quiet_T][:most])), float(median(first_T[~was_quiet_T][:most]))


def have_the_same_gradients(history: History, is_one_T: NDArray[np.bool_]) -> bool:
    """Say whether each tensor that one kind of steps moves is moved by the other as well: they are no two tasks."""
    moves_TL = history.param.window("grad.l2", len(is_one_T)) > 0
    return bool((moves_TL[is_one_T].any(axis=0) == moves_TL[~is_one_T].any(axis=0)).all())


def takes_turns(history: History) -> bool:
    """Say whether a tensor is moved at some steps and not at others: tasks in turn, each with a loss of its own."""
    share_L = (history.param.window("grad.l2", LENGTH) > 0).mean(axis=0)
    return bool(((share_L > 0.2) & (share_L < 0.8)).any())


def stretch(loss_T: Floats, *, high: float, low: float) -> int | None:
    """Return how many steps lie between the jumps of a loss, where all do lie equally far apart.

    Args:
        loss_T: Losses of successive steps, of shape (T,).
        high: Loss that each jump reaches in one step.
        low: Loss below which it was the step before.
    """
    jumps_P = np.flatnonzero((loss_T[1:] >= high) & (loss_T[:-1] < low)) + 1
    if len(jumps_P) < STRETCHES:
        return None
    apart_P = np.diff(jumps_P)
    length = int(apart_P[0])
    is_even = bool((apart_P == length).all()) and SHORTEST <= length <= LONGEST
    lasts = jumps_P[0] < 2 * length and len(loss_T) - jumps_P[-1] <= length  # from one end of the window to the other
    return length if is_even and lasts else None


def contrary(mean_TL: Floats, l2_TL: Floats, numel_L: Floats) -> tuple[int, float]:
    """Return after how many steps gradients pull as they did, and how much of them pulls against the other turns.

    The mean of a gradient's elements, in units of their root mean square, is the cosine of its angle with a fixed
    direction. What all turns have in common moves the weights; what is left of a turn's own mean the others take back.
    In the spectrum that is a line at just that period, while an optimizer that swings by itself, at any period, makes a
    hump, and noise is everywhere: what counts is the line's height above the largest of its neighbours.

    Args:
        mean_TL: Mean of the elements of each gradient, of shape (T, L), T being a multiple of 12.
        l2_TL: Their norms; tensors that are not moved at every step are left out.
        numel_L: Their numbers.

    Returns:
        The number of steps, and the share of the squared cosines, 0..1, as the mean over tensors (a weight behind which
        a softmax comes shows nothing): below 0 of random batches.
    """
    every = -(-mean_TL.shape[1] // MOST)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_TL = mean_TL[:, ::every] * np.sqrt(numel_L[::every]) / l2_TL[:, ::every]
    cosine_TL = cosine_TL[:, np.isfinite(cosine_TL).all(axis=0) & cosine_TL.any(axis=0)]
    if not cosine_TL.size:
        return 1, 0.0
    power_KL = np.square(np.abs(np.fft.rfft(cosine_TL / np.abs(cosine_TL).max(axis=0), axis=0)))
    power_KL[1:-1] *= 2  # the same again at negative frequencies
    share_K = (power_KL / power_KL.sum(axis=0)).mean(axis=1)
    found = []
    for period in ROUNDS:
        line = len(cosine_TL) // period
        beside = [share_K[k] for k in (line - 2, line - 1, line + 1, line + 2) if k < len(share_K)]
        found.append((float(share_K[line] - max(beside)), period))
    share, period = max(found)
    return period, share


def swing(log_T: Floats) -> tuple[float, float, int]:
    """Return the spread, the correlation from step to step and the number of crossings, without the trend."""
    place_T = np.arange(len(log_T)) - (len(log_T) - 1) / 2
    rest_T = log_T - log_T.mean() - place_T * (place_T @ log_T) / (place_T @ place_T)
    sorted_T = np.sort(rest_T)
    low, high = sorted_T[len(rest_T) // 10], sorted_T[-len(rest_T) // 10]
    above_T = rest_T > (low + high) / 2
    power = float(rest_T @ rest_T)
    correlation = float(rest_T[1:] @ rest_T[:-1]) / power if power > 0 else 0.0
    return float(high - low), correlation, int(np.count_nonzero(above_T[1:] != above_T[:-1]))
