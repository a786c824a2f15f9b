"""Store one bit for each unit of an activation module: whether the unit never fired."""

# C = units of a module

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class UnitMask(NamedTuple):
    """A flag for each unit of a module.

    Args:
        bits: 8 units to a byte, the first in the lowest bit; shape (ceil(C / 8),), uint8. Unused bits are 0.
        number: Number of units.
    """

    bits: NDArray[np.uint8]
    number: int

    def flags(self) -> NDArray[np.bool_]:
        """Return the flags as an array of shape (C,)."""
        return np.unpackbits(self.bits, count=self.number, bitorder="little").view(np.bool_)


def packed(flag_C: NDArray[np.bool_]) -> UnitMask:
    """Return flags of shape (C,) with one bit for each."""
    return UnitMask(np.packbits(flag_C, bitorder="little"), len(flag_C))


def num_bytes(number: int) -> int:
    """Return the number of bytes that hold a number of flags."""
    return -(-number // 8)  # rounded up
