"""Decide whether the lower envelope of a fraction creeps up steadily and is still rising.

The envelope is the smallest value of each block of steps, which selective units do not raise.
"""

# B = blocks of steps, L = parameter tensors or activation modules

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.robust_stats import Floats

BLOCK_STEPS = 16
"""Steps per block: a unit that is zero in every batch of a block is dead, not selective."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CreepBounds:
    """Thresholds of an envelope that creeps up; see the arguments of `RisingSparsity`."""

    rise: float
    level: float
    steady: float
    creeping: int
    most: float
    recent_rise: float
    creep_margin: float
    left: float

    def is_high(self, low_L: Floats, first_L: Floats) -> NDArray[np.bool_]:
        """Return where an envelope is far above its start."""
        is_high_L: NDArray[np.bool_] = (low_L >= self.level) & (low_L - first_L >= self.rise)
        return is_high_L

    def is_rising(self, low_BL: Floats) -> NDArray[np.bool_]:
        """Return where an envelope rises steadily and is still rising."""
        # all pairs of blocks, so that a single wave does not decide
        earlier, later = np.triu_indices(len(low_BL), 1)
        steady_L = (low_BL[later] > low_BL[earlier]).mean(axis=0)
        third, half = (low_BL[-1] - low_BL[-max(2, len(low_BL) // part)] for part in (3, 2))
        recent_L = np.where(low_BL[-1] >= self.most, half, third)  # an envelope near 1 has little left to rise
        is_rising_L: NDArray[np.bool_] = (steady_L >= self.steady) & (recent_L >= self.recent_rise)
        return is_rising_L

    def is_creeping(self, low_BL: Floats, first_L: Floats) -> NDArray[np.bool_]:
        """Return where an envelope rose slowly, or left hardly any unit."""
        part_BL = (low_BL - first_L) / (low_BL[-1] - first_L)
        is_slow_BL = (part_BL > self.creep_margin) & (part_BL < 1 - self.creep_margin)
        is_creeping_L: NDArray[np.bool_] = np.count_nonzero(is_slow_BL, axis=0) >= self.creeping
        is_creeping_L |= low_BL[-1] >= self.most
        return is_creeping_L
