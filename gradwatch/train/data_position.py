"""Where the steps of a training stand in its data, and which of them are left out as bad."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from gradwatch.train.batches import Batches, Indices

Identity = list[int]
"""Epoch, first batch in it, and checksum of the samples' indices; plain numbers, for a checkpoint.

Where it is left out, the epoch and batch follow from which on it is: before that, its step was made.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The batches of one optimizer step.

    Args:
        epoch: Their epoch.
        batch: Number of the first in it.
        length: How many they are; fewer than `train.accumulate` at the end of an epoch.
    """

    epoch: int
    batch: int
    length: int

    def indices(self, batches: Batches) -> list[Indices]:
        """Return the indices of the samples of each batch."""
        return [batches.indices(self.epoch, self.batch + i) for i in range(self.length)]

    def read(self, batches: Batches) -> list[Any]:
        """Return the batches, as the training reads them."""
        return [batches.read(self.epoch, self.batch + i) for i in range(self.length)]

    def identity(self, batches: Batches) -> Identity:
        """Return what tells the step's samples from all others, after a restart and in another epoch too."""
        return [self.epoch, self.batch, zlib.crc32(b"".join(part.tobytes() for part in self.indices(batches)))]

    def is_among(self, bad: Sequence[Identity], batches: Batches) -> bool:
        """Say whether the step has the place or the samples of one that is left out from here or earlier on."""
        if not bad:
            return False
        *here, checksum = self.identity(batches)
        return any(here >= known[3:] and (here == known[:2] or checksum == known[2]) for known in bad)


def positions(
    batches: Batches, *, accumulate: int, epoch: int, batch: int, bad: Sequence[Identity] = ()
) -> Iterator[Position]:
    """Yield where one step after the other stands, without those that are bad, from a place in the data on."""
    while True:
        while batch < len(batches):
            position = Position(epoch=epoch, batch=batch, length=min(accumulate, len(batches) - batch))
            if not position.is_among(bad, batches):
                yield position
            batch += position.length
        epoch, batch = epoch + 1, 0
