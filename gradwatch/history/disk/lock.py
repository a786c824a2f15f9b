"""Lock a run directory against other writers, and detect if its run is active."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks: two processes may write to one run, and a killed run looks alive
    fcntl = None


def acquire(directory: Path) -> int:
    """Lock a run directory, and return the descriptor of the lock.

    The lock is held until the descriptor is closed or the process dies.

    Raises:
        RunError: Another process holds the lock.
    """
    descriptor = atomic.open_at_end(_path(directory))
    if _is_held_elsewhere(descriptor, if_unknown=False):
        os.close(descriptor)
        raise RunError(f"{directory}: another process is writing to this run; stop it first")
    return descriptor


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
