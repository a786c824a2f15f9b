"""Work that must not hold up its caller: items go to a function, in order, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")

AT_ONCE = 256
"""Items that are handed over together at most: what came in meanwhile need not wait long for its turn."""
GATHER_S = 1.0
"""Time from one turn to the next: many items share what a turn takes, and find code and data in the caches."""
WAKE_S = 0.25
"""Time between two looks at whether the program has ended, which then need not wait for the next turn."""
LINGER_S = 1.0
"""Time without items after which the thread ends, so that it keeps nobody alive; the next item starts another."""


@final
class Background(Generic[T]):
    """Hands items to a function, several at once, in the order in which they came; the caller waits only if it asks to.

    What the function raises ends the work on all that waits, and is raised in the caller by its next call. The thread
    is no daemon: a program that ends has its last items worked off.

    Args:
        process: Called with the items that have come in, on one thread at a time.
        source: Called for what is ready and was not put, which comes behind all that was; None where nothing is.
        then: Called when no item is left for now.
        limit: Items that may wait; a caller that brings more works them off itself.
        name: Name of the thread.
    """

    def __init__(
        self,
        process: Callable[[list[T]], object],
        *,
        source: Callable[[], T | None] | None = None,
        then: Callable[[], None] | None = None,
        limit: int,
        name: str,
    ) -> None:
        self._process = process
        self._source = source
        self._then = then
        self._limit = limit
        self._name = name
        self._items: deque[T] = deque()
        self._gathering = threading.Lock()
        self._working = threading.Lock()
        self._starting = threading.Lock()
        self._worker: int | None = None
        self._is_running = False
        self._error: Exception | None = None
        self.busy_s = 0.0
        """Processor time that the function has taken so far."""

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._items)

    @property
    def is_busy(self) -> bool:
        """Whether an item waits or is being worked on."""
        return bool(self._items) or self._working.locked()

    def put(self, item: T) -> None:
        """Leave an item to the thread, behind what the source has ready."""
        self._gather()
        self._items.append(item)
        self._see_to_it()

    def pull(self) -> None:
        """Leave to the thread what the source has ready."""
        self._gather()
        if self._items:
            self._see_to_it()

    def _gather(self) -> None:
        if self._source is None:
            return
        with self._gathering:  # else what one thread has taken could come behind what another takes next
            item = self._source()
            if item is not None:
                self._items.append(item)

    def _see_to_it(self) -> None:
        """See to it that what waits is worked off in time."""
        if self._error is not None or len(self._items) > self._limit:
            self.finish()
        if not self._is_running:
            self._start()

    def finish(self) -> None:
        """Return when all items have been worked off; at once where the function itself asks."""
        if self._worker == threading.get_ident():
            return
        self._gather()
        if self.is_busy:
            self._work_off()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        with self._starting:
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name=self._name).start()

    def _run(self) -> None:
        idle_s = 0.0
        while True:
            is_last = _sleep()
            self._gather()
            idle_s = 0.0 if self._items else idle_s + GATHER_S
            if self._items and self._error is None:
                self._work_off()
            elif (idle_s >= LINGER_S or is_last) and self._has_ended():
                return

    def _has_ended(self) -> bool:
        """Give up being the thread that `put` relies on, unless an item came in at the last moment."""
        self._is_running = False
        if not self._items or self._error is not None:
            return True
        with self._starting:
            is_replaced, self._is_running = self._is_running, True
        return is_replaced

    def _work_off(self) -> None:
        with self._working:
            self._worker = threading.get_ident()
            began = time.thread_time()
            try:
                while self._items and self._error is None:
                    self._process([self._items.popleft() for _ in range(min(len(self._items), AT_ONCE))])
                if self._then and self._error is None:
                    self._then()
            except Exception as error:  # for the caller, who finds it at its next call
                self._error = error
                self._items.clear()
            finally:
                self._worker = None
                self.busy_s += time.thread_time() - began


def _sleep() -> bool:
    """Sleep until the next turn, or until the program has come to its end; say whether it has."""
    until = time.monotonic() + GATHER_S
    while threading.main_thread().is_alive() and (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, WAKE_S))
    return not threading.main_thread().is_alive()
