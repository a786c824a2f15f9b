"""Write files so that neither a kill nor a full disk takes what is already there."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from gradwatch.errors import RunError

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: into a neighbour first, then renamed over the old one.

    Raises:
        RunError: It could not be written; what was there before is still there.
    """
    neighbour = path.with_name(path.name + ".tmp")
    try:
        neighbour.write_bytes(data)
        neighbour.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            neighbour.unlink()
        raise unwritten(path, needed=len(data), error=error) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(path, needed=0, error=error) from error


def open_at_end(path: Path) -> int:
    """Open a file for `append`, new where it is missing, and return its descriptor."""
    try:
        return os.open(path, APPENDING, 0o666)
    except OSError as error:
        raise unwritten(path, needed=0, error=error) from error


def append(file: int, data: bytes, *, path: Path, size: int) -> None:
    """Append to a file all of the data or nothing.

    Args:
        file: Descriptor, opened for appending.
        data: What to write.
        path: Its name, for the error.
        size: Bytes in the file so far.

    Raises:
        RunError: It could not be written; the file is as long as before.
    """
    try:
        done = os.write(file, data)
        while done < len(data):  # a nearly full disk takes a part, and says why at the next call
            done += os.write(file, data[done:])
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise unwritten(path, needed=len(data), error=error) from error


def unwritten(path: Path, *, needed: int, error: OSError) -> RunError:
    """Return the error that tells a user why a file was not written, and the way out."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno not in OUT_OF_SPACE:
        return RunError(f"{path}: cannot be written: {reason}")
    amount = f"{needed:,} more bytes were needed. " if needed else ""
    return RunError(
        f"{path}: {reason}. {amount}What was recorded before is safe; "
        "make room on that disk (or raise the quota or the limit of file sizes), then resume the run"
    )
