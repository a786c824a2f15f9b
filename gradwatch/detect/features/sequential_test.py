"""Evidence that adds up from block to block, with a bound on how often it misleads however often it is looked at."""

# B = blocks of steps

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats, median


def aligned_blocks(values_T: Floats, first_step: int, size: int) -> Floats:
    """Return the medians of the blocks of steps 0 to `size` - 1, `size` to 2 `size` - 1, ... that lie in a window.

    A sequential test must see each block once, as it was: blocks that are counted back from the newest step would be
    others at each look.

    Args:
        values_T: Values of successive steps, of shape (T,).
        first_step: Step of the first of them.
        size: Steps per block. Those of a block that is not whole are left out.

    Returns:
        Medians of shape (B,), oldest first; B may be 0.
    """
    start = -first_step % size
    whole = max(0, len(values_T) - start) // size * size
    return median(values_T[start : start + whole].reshape(-1, size).T) if whole else values_T[:0]


def stall(values_B: Floats, *, rate: float) -> float:
    """Return how many times likelier the new lows of a series are if it stands still than if it falls.

    In a series without direction block i is the lowest so far with a chance of 1 / i, whatever its distribution and
    independently of the blocks before (Rényi 1962, "Théorie des éléments saillants d'une suite d'observations"). One
    that falls sets a new low with a chance of at least `rate` each time. The product of the ratios of these chances is
    a supermartingale for the second kind: by Ville's inequality it ever reaches 1 / alpha in at most the fraction alpha
    of such series, however often one looks (Wald 1945, sequential probability ratio test; Ville 1939).

    Args:
        values_B: A value per block, such as its median, of shape (B,).
        rate: Chance of a new low, 0.5 to 1, with which a series counts as falling.
    """
    if len(values_B) < 2:
        return 1.0
    lowest_B = np.minimum.accumulate(values_B)
    is_low_B = values_B[1:] < lowest_B[:-1]
    chance_B = 1 / np.arange(2, len(values_B) + 1)
    log_B = np.where(is_low_B, np.log(chance_B / rate), np.log((1 - chance_B) / (1 - rate)))
    return float(np.exp(log_B.sum()))
