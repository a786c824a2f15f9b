"""Remember the optimizers that a script has made, and when."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import final

from torch.optim import Optimizer


@final
class MadeOptimizers:
    """The optimizers of a script that no loop has, with the clock of the script when each was made."""

    def __init__(self) -> None:
        self._all: list[tuple[int, weakref.ref[Optimizer]]] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([optimizer for _, ref in self._all if (optimizer := ref()) is not None])

    def add(self, optimizer: Optimizer, clock: int) -> None:
        """Add an optimizer that was just made."""
        self._all.append((clock, weakref.ref(optimizer)))

    def keep(self, optimizers: Collection[Optimizer]) -> None:
        """Forget all but some optimizers."""
        self._all = [(clock, ref) for clock, ref in self._all if ref() in optimizers]

    def newest(self, optimizer: Optimizer) -> int:
        """Return the clock when an optimizer was made; 0 if it is unknown."""
        return max(self._clocks_of([optimizer]), default=0)

    def oldest(self, optimizers: Collection[Optimizer]) -> int:
        """Return the clock when the first of some optimizers was made; 0 if all are unknown."""
        return min(self._clocks_of(optimizers), default=0)

    def _clocks_of(self, optimizers: Collection[Optimizer]) -> list[int]:
        ids = set(map(id, optimizers))
        return [clock for clock, ref in self._all if id(ref()) in ids]
