"""Count the trainings that are watched by their own code, so that `gradwatch run` leaves them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import final


@final
class WatchCalls:
    """Informs `gradwatch run`, which calls `watch` for a script, that the script watches its training itself.

    Attributes:
        number: Number of calls of `watch`, and of trainings from a config, so far.
        listener: Called before each further one does anything, or None.
    """

    def __init__(self) -> None:
        self.number = 0
        self.listener: Callable[[], None] | None = None

    def add(self) -> None:
        """Count a call of `watch`, or a training from a config."""
        self.number += 1
        if self.listener is not None:
            self.listener()


calls = WatchCalls()
