"""Lock a run directory against other writers, and detect if its run is active."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import ModuleType
from typing import final

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks: two processes may write to one run, and a killed run looks alive
    fcntl = None


@final
class Lock:
    """A held lock of a run directory. It is released by `release`, with this object, or if the process dies.

    Args:
        directory: The run directory.
        descriptor: Descriptor of the locked file.
    """

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._path, self._pid = directory.resolve(), os.getpid()
        # also for a monitor that is never closed: its directory must not stay locked
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False  # the end of the process releases it, after the last rows are written

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._finalizer()

    def is_of(self, directory: Path) -> bool:
        """Return whether this process holds the lock of a directory with this object."""
        # a forked child has a copy of the object, but not the lock
        return self._finalizer.alive and self._path == directory.resolve() and self._pid == os.getpid()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
"""Locks of this process, which POSIX grants to one process any number of times."""


def acquire(directory: Path) -> Lock:
    """Lock a run directory, whose folder `history` exists.

    Raises:
        RunError: Another process, or another writer of this process, holds the lock.
    """
    # first: closing a second descriptor of the file would release the lock of the first
    if any(lock.is_of(directory) for lock in tuple(_locks)):
        raise RunError(f"{directory}: another monitor of this process is writing to this run; close() it first")
    descriptor = atomic.open_at_end(_path(directory))
    if _is_held_elsewhere(descriptor, if_unknown=False):
        os.close(descriptor)
        raise RunError(f"{directory}: another process is writing to this run; stop it first")
    lock = Lock(directory, descriptor)
    _locks.add(lock)
    return lock


def is_held(directory: Path) -> bool:
    """Return whether another process writes to a run, or True if this is unknown."""
    try:
        descriptor = os.open(_path(directory), os.O_RDWR)
    except OSError:  # no lock file, or a file that this user may not open
        return True
    try:
        return _is_held_elsewhere(descriptor, if_unknown=True)
    finally:
        os.close(descriptor)


def _path(directory: Path) -> Path:
    return directory / "history" / "lock"


def _is_held_elsewhere(descriptor: int, *, if_unknown: bool) -> bool:
    """Try to lock a file, and return whether another process holds the lock."""
    if fcntl is None:
        return if_unknown
    try:
        # lockf instead of flock: a forked data worker that outlives its parent would inherit a flock
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both for a held lock
        return True
    except OSError:  # a file system without locks
        return if_unknown
    return False
