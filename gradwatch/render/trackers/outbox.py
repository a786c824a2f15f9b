"""Send to a server on a separate thread, so that a slow server delays neither the training nor the detectors."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import final

MAX_WAITING = 100
"""Maximum number of waiting points. A server that is slower than the training gets fewer points."""
MAX_FAILURES = 5
"""Failures in a row after which nothing more is sent. The libraries themselves retry before they fail."""


@final
class Outbox:
    """Calls functions in order on a daemon thread. A program that ends does not wait for the thread.

    After `MAX_FAILURES` exceptions in a row, all later functions are dropped, except the last one.

    Args:
        name: Name of the thread.
        on_broken: Called with the newest exception when functions begin to be dropped.

    Attributes:
        cpu_s: Processor time that the functions have used so far.
    """

    def __init__(self, name: str, *, on_broken: Callable[[Exception], object]) -> None:
        self.cpu_s = 0.0
        self._on_broken = on_broken
        self._num_failures = 0
        self._error: Exception | None = None
        self._queue: queue.Queue[tuple[Callable[[], object], bool]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], object]) -> None:
        """Send after everything that waits."""
        self._queue.put((send, False))

    def put_point(self, send: Callable[[], object]) -> None:
        """Send after everything that waits, unless too much waits already."""
        if self._queue.qsize() < MAX_WAITING:
            self.put(send)

    def close(self, send: Callable[[], object], *, timeout_s: float) -> None:
        """Send for the last time, and wait until everything is sent.

        Args:
            send: The last function. It is called even if others have failed.
            timeout_s: Maximum seconds to wait. The thread keeps sending the rest as long as the program runs.

        Raises:
            TimeoutError: Not everything was sent in time.
            Exception: The last call failed.
        """
        self._queue.put((send, True))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not everything was sent within {timeout_s:g} s")
        if self._error:
            raise self._error

    def _run(self) -> None:
        is_last = False
        while not is_last:
            send, is_last = self._queue.get()
            if self._num_failures < MAX_FAILURES or is_last:
                self._attempt(send)

    def _attempt(self, send: Callable[[], object]) -> None:
        began_s = time.thread_time()
        try:
            send()
        except Exception as error:  # of any kind: each library has its own
            self._error = error
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                self._on_broken(error)
        else:
            self._error, self._num_failures = None, 0
        self.cpu_s += time.thread_time() - began_s
