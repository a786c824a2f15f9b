"""How calls of `Monitor.step` and updates alternate: a call per update, or one per micro-batch."""

from __future__ import annotations

from typing import final

from gradwatch.monitor.best_effort import warn_once


@final
class Rhythm:
    """Learns after how many calls an update comes.

    Args:
        accumulate: Up to so many calls are the micro-batches of one update.

    Attributes:
        calls: Calls since the last row.
    """

    def __init__(self, accumulate: int) -> None:
        self.warned: set[str] = set()
        self.calls = 0
        self._accumulate = accumulate
        self._idle, self._interval = 0, 1

    @property
    def is_even(self) -> bool:
        """Whether an update came before each call, as far as calls have been learned."""
        return self._interval == 1 and not self._idle

    @property
    def is_full(self) -> bool:
        """Whether as many calls came as an update has micro-batches."""
        return self.calls >= self._accumulate

    def learn(self, *, is_updated: bool) -> None:
        """Take it for accumulation where updates come every so many calls, twice in a row."""
        if not is_updated:
            self._idle += self.is_full
            return
        interval, self._idle = self._idle + 1, 0
        if interval == self._interval > 1:
            self._accumulate *= interval
            text = f"the optimizer steps once in {self._accumulate} calls of step(), which now make one row together"
            warn_once(self, "rhythm", f"{text}: call it after optimizer steps, or give accumulate={self._accumulate}")
        self._interval = interval
