"""Handle Ctrl-C and SIGTERM: the first asks the loop to save and end, the second quits."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Interrupt:
    """Records the first signal instead of raising it. Outside the main thread, it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere signal.signal raises ValueError
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # the second signal: the user does not want to wait for the save
            raise KeyboardInterrupt
        self.requested = True
