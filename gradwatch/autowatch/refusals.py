"""Remember the optimizers that are not watched, and report why once."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import final

from torch.optim import Optimizer

from gradwatch.autowatch.messages import kinds_of, say_left_out, say_no_step, say_not_understood


@final
class Refusals:
    """The optimizers of a script that are ignored. Only the first reason is printed."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_said = False

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._optimizers

    def add(self, optimizers: Collection[Optimizer], reason: str, *, beside_others: bool) -> None:
        """Ignore optimizers from now on.

        Args:
            optimizers: The optimizers; none if the script as a whole is not understood.
            reason: Why they are not watched.
            beside_others: Whether other trainings of the script are watched.
        """
        self._optimizers.update(optimizers)
        if self._has_said:
            return
        self._has_said = True
        if beside_others and optimizers:  # such as the temperature of a policy, which is a tensor on its own
            say_left_out(kinds_of(optimizers), reason)
        else:
            say_not_understood(reason)

    def add_without_step(self, num_backward: int) -> None:
        """Report that a script has made backward passes and no update."""
        self._has_said = True
        say_no_step(num_backward)
