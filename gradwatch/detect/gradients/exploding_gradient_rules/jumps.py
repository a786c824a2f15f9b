"""Find losses or gradients of two levels that are powers of ten apart, between which the run jumps from the start.

A division makes two levels if its divisor is usually of order one and at times zero plus an epsilon: advantages over a
deviation of equal rewards, windows over the deviation of a constant signal, weights over counts that may be 0. Clipping
keeps the weights in place, but the batches of the upper level alone decide the direction of the updates.

Levels that take turns with a fixed period belong to two kinds of batches, which `oscillating-gradient` judges: a
divisor reaches 0 at irregular steps.
"""

# T = steps of a window with a size other than 0

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import History
from gradwatch.history.table import WINDOW
from gradwatch.records import Quantity


def find_jumps(
    history: History,
    norm_T: Floats,
    *,
    kind: str,
    decades: float,
    num_jumps: int,
    gap_frac: float,
    period_steps: int,
    start_sizes: int,
) -> Sign | None:
    """Return a sign if the size of loss and gradient has had two levels since the start of the run.

    The size of a step is the larger of absolute loss and gradient norm. A loss that crosses zero is small by chance,
    and its gradient is not; a gradient may be recorded after clipping, and the loss is not clipped. A size of exactly 0
    says nothing: no term of the loss counted.

    Args:
        history: History of the run.
        norm_T: Total gradient norms of the newest steps.
        kind: Kind of the resulting finding.
        decades: Minimum distance of the levels, in powers of ten.
        num_jumps: Minimum number of jumps up, and down, and of steps at each level.
        gap_frac: Minimum width of the empty range between the levels, as a fraction of their distance.
        period_steps: Longest period of two kinds of batches in turn.
        start_sizes: Number of first sizes that must hold both levels.
    """
    if history.step >= WINDOW:  # the window no longer holds the start
        return None
    size_T = np.fmax(np.abs(history.scalar("loss")), norm_T)
    is_known_T = np.isfinite(size_T) & (size_T > 0)
    size_T, steps_T = size_T[is_known_T], history.run.steps()[is_known_T]
    sorted_T = np.sort(size_T)
    log_T = np.log10(sorted_T)
    if len(log_T) < 2 * num_jumps or log_T[-1] - log_T[0] < decades:  # cheap: most runs vary less
        return None
    gap_T = np.diff(log_T)[num_jumps - 1 : len(log_T) - num_jumps]  # enough sizes below and above
    border = num_jumps + int(np.argmax(gap_T))
    distance = float(median(log_T[border:]) - median(log_T[:border]))
    is_high_T = size_T >= sorted_T[border]
    turn_T = np.diff(is_high_T.astype(int))
    jumps = min(np.count_nonzero(turn_T > 0), np.count_nonzero(turn_T < 0))
    has_gap = distance >= decades and gap_T.max() >= gap_frac * distance
    starts_late = len(set(is_high_T[:start_sizes].tolist())) == 1
    if not has_gap or jumps < num_jumps or starts_late or _is_periodic(is_high_T, steps_T, longest=period_steps):
        return None
    high, low = float(median(sorted_T[border:])), float(median(sorted_T[:border]))
    return Sign(
        f"loss and gradient jump {format_fold(distance)} up and down again, {jumps} times: a division by almost 0",
        (
            Quantity(key="size.jumps", label="jumps up and down", value=float(jumps)),
            Quantity(key="size.high", label="upper level of the larger of |loss| and gradient norm", value=high),
            Quantity(key="size.low", label="lower level of the larger of |loss| and gradient norm", value=low),
        ),
        since=int(steps_T[np.argmax(is_high_T)]),
        severity=severity_after(history, kind),
    )


def _is_periodic(is_high_T: NDArray[np.bool_], steps_T: NDArray[np.int64], *, longest: int) -> bool:
    """Return whether the step alone determines the level, since levels take turns with a fixed period."""
    for period in range(2, longest + 1):
        turns = [is_high_T[steps_T % period == phase] for phase in range(period)]
        if all(len(set(turn.tolist())) <= 1 for turn in turns):
            return True
    return False
