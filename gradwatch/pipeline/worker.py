"""Process items in order on a worker thread, without delaying the caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")

MAX_ITEMS_AT_ONCE = 256
"""Maximum number of items per call of the function. Items that arrive during a call do not wait long."""
BATCH_S = 1.0
"""Time between two batches. Many items share the cost of a batch, and find code and data in the caches."""
POLL_S = 0.25
"""Time between two checks whether the program has ended. The end of a program does not wait for the next batch."""
MAX_IDLE_S = 1.0
"""Time without items after which the thread ends, so that it keeps no program alive. The next item starts another
thread."""


@final
class Worker(Generic[T]):
    """Pass items to a function on a thread, several at once, in the order of arrival.

    An exception of the function drops all waiting items, and the next call of the caller raises it. The thread is not
    a daemon: if the program ends, its last items are still processed.

    Args:
        process: Called with the items that have arrived, on one thread at a time.
        source: Returns an item that is ready but was not put, to follow all items so far; None if there is none.
        when_idle: Called when no item is left.
        is_holding: Returns whether the function holds items that it was passed. It is then called again, with none.
        limit: Maximum number of waiting items. A caller that puts more processes the items itself.
        name: Name of the thread.

    Attributes:
        cpu_s: Processor time that the function has used so far.
    """

    def __init__(
        self,
        process: Callable[[list[T]], object],
        *,
        source: Callable[[], T | None] | None = None,
        when_idle: Callable[[], None] | None = None,
        is_holding: Callable[[], bool] = lambda: False,
        limit: int,
        name: str,
    ) -> None:
        self.cpu_s = 0.0
        self._process = process
        self._source = source
        self._when_idle = when_idle
        self._is_holding = is_holding
        self._limit = limit
        self._name = name
        self._items: deque[T] = deque()
        # lock order: no lock is requested while `_pulling` or `_starting` is held.
        self._pulling = threading.Lock()
        self._processing = threading.Lock()
        self._starting = threading.Lock()
        self._processing_thread: int | None = None
        self._is_running = False
        self._error: Exception | None = None

    def abandon(self) -> None:
        """Drop all items from now on, in a forked child, where the thread does not run."""
        self._items = deque(maxlen=0)
        self._source = None
        # the thread may have held the locks at the fork, and would never release them here
        self._pulling, self._processing, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self._is_running, self._processing_thread, self._error = True, None, None

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._items)

    @property
    def is_busy(self) -> bool:
        """Return whether an item waits, is held or is being processed."""
        return self._has_work or self._processing.locked()

    @property
    def _has_work(self) -> bool:
        return bool(self._items) or self._is_holding()

    def put(self, item: T) -> None:
        """Pass an item to the thread, after the items that the source has ready."""
        self._pull_source()
        self._items.append(item)
        self._ensure_running()

    def pull(self) -> None:
        """Pass the item that the source has ready to the thread."""
        self._pull_source()
        if self._items:
            self._ensure_running()

    def finish(self) -> None:
        """Wait until all items are processed. Returns at once if the function itself calls it."""
        if self._processing_thread == threading.get_ident():  # waiting for itself would be a deadlock
            return
        self._pull_source()
        if self.is_busy:
            self._drain()
        error, self._error = self._error, None  # raised once
        if error is not None:
            raise error

    def _pull_source(self) -> None:
        if self._source is None:
            return
        with self._pulling:  # else an item that one thread has taken could follow a later one of another thread
            item = self._source()
            if item is not None:
                self._items.append(item)

    def _ensure_running(self) -> None:
        """Start a thread if none runs. If too many items wait, process them here."""
        if self._error is not None or len(self._items) > self._limit:
            self.finish()
        if not self._is_running:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._is_running:  # another thread was faster
                return
            self._is_running = True
        threading.Thread(target=self._run, name=self._name).start()

    def _run(self) -> None:
        idle_s = 0.0
        while True:
            is_last = _sleep()
            self._pull_source()
            idle_s = 0.0 if self._has_work else idle_s + BATCH_S  # the time of `_sleep`
            # held items keep no program alive: it still closes the run, at its exit
            if (self._items or (self._is_holding() and not is_last)) and self._error is None:
                self._drain()
            elif (idle_s >= MAX_IDLE_S or is_last) and self._retire():
                return

    def _retire(self) -> bool:
        """Mark the thread as ended. Return False if an item has arrived and no other thread has started."""
        # before the check of the items: a `put` after the check then starts another thread
        self._is_running = False
        if not self._items or self._error is not None:
            return True
        with self._starting:
            is_replaced, self._is_running = self._is_running, True
        return is_replaced

    def _drain(self) -> None:
        """Process items until none is left, at least once."""
        with self._processing:  # a caller may drain at the same time as the thread
            self._processing_thread = threading.get_ident()
            began_s = time.thread_time()
            try:
                while True:
                    count = min(len(self._items), MAX_ITEMS_AT_ONCE)
                    self._process([self._items.popleft() for _ in range(count)])
                    if not self._items or self._error is not None:
                        break
                if self._when_idle and self._error is None:
                    self._when_idle()
            except Exception as error:  # of any kind: the next call of the caller raises it
                self._error = error
                self._items.clear()
            finally:
                self._processing_thread = None
                self.cpu_s += time.thread_time() - began_s


def _sleep() -> bool:
    """Sleep until the next batch or the end of the main thread. Return whether the main thread has ended."""
    until_s = time.monotonic() + BATCH_S
    while threading.main_thread().is_alive() and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, POLL_S))
    return not threading.main_thread().is_alive()
