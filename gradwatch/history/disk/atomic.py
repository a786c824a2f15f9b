"""Write files without losing data on disk if the process is killed or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from gradwatch.errors import RunError

# O_BINARY exists on Windows only, where text mode would change line ends
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: write a temporary file next to it, then rename the temporary file.

    Raises:
        RunError: The file could not be written. Its old content is unchanged.
    """
    with replacement(path, needed=len(data)) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacement(path: Path, *, needed: int = 0) -> Iterator[Path]:
    """Replace a file atomically by a temporary file next to it, which the block writes.

    Args:
        path: The file.
        needed: Bytes to write, for the error; 0 if they are not known.

    Raises:
        RunError: The file could not be written. Its old content is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        if isinstance(error, OSError):
            raise write_error(path, needed=needed, error=error) from error
        raise


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
    """Append all data to a file, or nothing.

    Args:
        file: Descriptor from `open_at_end`.
        data: Bytes to append.
        path: Path of the file, for the error.
        size: Bytes in the file so far.

    Raises:
        RunError: The data could not be written. The file has its old length.
    """
    try:
        done = os.write(file, data)
        while done < len(data):  # a nearly full disk writes a part, and raises at the next call
            done += os.write(file, data[done:])
    except OSError as error:
        with contextlib.suppress(OSError):  # a reader ignores an incomplete record, if it has to stay
            os.ftruncate(file, size)
        raise write_error(path, needed=len(data), error=error) from error


def write_error(path: Path, *, needed: int, error: OSError) -> RunError:
    """Return an error for the user: the file, the reason of the failure, and the remedy."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno not in OUT_OF_SPACE:
        return RunError(f"{path}: cannot be written: {reason}")
    amount = f"{needed:,} more bytes were needed. " if needed else ""
    return RunError(
        f"{path}: {reason}. {amount}What was recorded before is safe; "
        "make room on that disk (or raise the quota or the limit of file sizes), then resume the run"
    )
