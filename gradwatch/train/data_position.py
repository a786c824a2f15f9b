"""Compute the data position of each optimizer step, and skip the steps that are marked as bad."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from gradwatch.errors import GradwatchError
from gradwatch.train.batches import Batches
from gradwatch.train.parallel.parts import Indices
from gradwatch.train.streams.batches import StreamBatches

Identity = list[int]
"""Epoch, first batch in the epoch, and checksum of the sample indices; plain numbers, for a checkpoint.

An identity in the list of bad steps has two more numbers: the epoch and batch from which its batches are skipped.
The step was made before that position.
"""


def numbered(batches: Batches | StreamBatches) -> Batches:
    """Return batches that can be read by number.

    Raises:
        GradwatchError: The batches come from a stream.
    """
    if isinstance(batches, StreamBatches):
        raise GradwatchError("data: the batches of a stream have no numbers, so one of them cannot be read again")
    return batches


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The batches of one optimizer step.

    Args:
        epoch: Epoch of the batches.
        batch: Number of the first batch in the epoch.
        length: Number of batches; fewer than `train.accumulate` at the end of an epoch.
    """

    epoch: int
    batch: int
    length: int

    def indices(self, batches: Batches) -> list[Indices]:
        """Return the sample indices of each batch."""
        return [batches.indices(self.epoch, self.batch + i) for i in range(self.length)]

    def read(self, batches: Batches) -> list[Any]:
        """Read the batches as the training reads them."""
        return [batches.read(self.epoch, self.batch + i) for i in range(self.length)]

    def identity(self, batches: Batches) -> Identity:
        """Return the identity of the step's samples, which is valid across restarts and epochs."""
        return [self.epoch, self.batch, zlib.crc32(b"".join(part.tobytes() for part in self.indices(batches)))]

    def is_among(self, bad: Sequence[Identity], batches: Batches) -> bool:
        """Return whether the step has the position or the samples of a bad step that is skipped from here on."""
        if not bad:
            return False  # the usual case needs no checksum of the indices
        *here, checksum = self.identity(batches)
        # known[3:] is the position from which a bad step is skipped; before it, a replay must make the step
        return any(here >= known[3:] and (here == known[:2] or checksum == known[2]) for known in bad)


def positions(
    batches: Batches, *, accumulate: int, epoch: int, batch: int, bad: Sequence[Identity] = ()
) -> Iterator[Position]:
    """Yield the position of each step from the given epoch and batch, without the bad steps."""
    while True:
        while batch < len(batches):
            position = Position(epoch=epoch, batch=batch, length=min(accumulate, len(batches) - batch))
            if not position.is_among(bad, batches):
                yield position
            batch += position.length
        epoch, batch = epoch + 1, 0  # a step never spans two epochs
