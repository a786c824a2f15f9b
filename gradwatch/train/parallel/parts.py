"""Split a global batch into contiguous parts, one for each rank."""

# B = samples of the global batch

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@final
class StandIn(tuple[Any, ...]):
    """A batch of a rank without samples: the first sample of the global batch, which counts for nothing.

    The rank needs an input, since every rank must take part in each forward and backward pass.
    """

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of each global batch that a rank reads.

    Args:
        rank: The rank.
        world_size: Number of ranks.
    """

    rank: int = 0
    world_size: int = 1

    def of(self, indices_B: Indices) -> Indices:
        """Return the indices of this rank, or the index of a stand-in if there are fewer samples than ranks.

        The sizes of the parts differ by at most 1, and earlier ranks have the larger parts.
        """
        if self.world_size == 1:
            return indices_B
        if self.is_empty(len(indices_B)):
            return indices_B[:1]
        size, larger = divmod(len(indices_B), self.world_size)
        first = self.rank * size + min(self.rank, larger)
        return indices_B[first : first + size + (self.rank < larger)]

    def is_empty(self, num_samples: int) -> bool:
        """Return whether no sample of a global batch is left for this rank."""
        return self.rank >= num_samples
