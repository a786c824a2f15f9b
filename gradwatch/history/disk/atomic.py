"""Write files so that neither a killed process nor a full disk loses data that are already on disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from gradwatch.errors import RunError

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: write a temporary file next to it, then rename that.

    Raises:
        RunError: The file could not be written; its old content is still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(path, needed=len(data), error=error) from error


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, needed=0, error=error) from error


def open_at_end(path: Path) -> int:
    """Open a file for `append`, create it if it is missing, and return its descriptor."""
    try:
        return os.open(path, APPENDING, 0o666)
    except OSError as error:
        raise write_error(path, needed=0, error=error) from error


def append(file: int, data: bytes, *, path: Path, size: int) -> None:
    """Append all of the data to a file, or nothing.

    Args:
        file: Descriptor from `open_at_end`.
        data: Bytes to append.
        path: Path of the file, for the error.
        size: Bytes in the file so far.

    Raises:
        RunError: The data could not be written; the file is as long as before.
    """
    try:
        done = os.write(file, data)
        while done < len(data):  # a nearly full disk takes a part, and raises at the next call
            done += os.write(file, data[done:])
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise write_error(path, needed=len(data), error=error) from error


def write_error(path: Path, *, needed: int, error: OSError) -> RunError:
    """Return an error for the user: which file was not written, why, and what to do."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno not in OUT_OF_SPACE:
        return RunError(f"{path}: cannot be written: {reason}")
    amount = f"{needed:,} more bytes were needed. " if needed else ""
    return RunError(
        f"{path}: {reason}. {amount}What was recorded before is safe; "
        "make room on that disk (or raise the quota or the limit of file sizes), then resume the run"
    )
