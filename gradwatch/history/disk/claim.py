"""Claim a run directory for a new run: the next free name, or a directory whose run is deleted."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic, lock
from gradwatch.history.disk.events import EVENTS
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.history.disk.header import NAME, SHARED, Header
from gradwatch.history.disk.lock import Lock
from gradwatch.history.disk.segments import SUFFIX

WRITTEN = (
    *(f"history/{folder}/*{SUFFIX}*" for folder in SHARED),
    f"{FINDINGS.name}*",
    f"{EVENTS.name}*",
    "incidents/step-*",
    "report.html*",
    f"events.out.tfevents.{'[0-9]' * 10}.{'[0-9]' * 9}.*",  # other writers of TensorBoard put no nanoseconds there
)
"""Patterns of the files and folders that a run in a user's own loop has written, with unfinished ones. The
header is not deleted but replaced, so that a kill leaves a directory that is known to be a run."""


def claim_free(directory: Path) -> Path:
    """Create a run directory with this name or the next free one, such as `mine-2`.

    A name other than the given one is printed to stderr.

    If several processes ask for one name at once, each gets a different directory.

    Raises:
        RunError: The directory cannot be created.
    """
    path, number = directory, 1
    while not _is_claimed(path):
        number += 1
        path = directory.with_name(f"{directory.name}-{number}")
    if number > 1:
        sys.stderr.write(f"gradwatch: {directory} already holds a run; this one is written to {path}\n")
    return path


def _is_claimed(directory: Path) -> bool:
    """Create a directory for a run. Return False if a run has claimed it. Other files in it do not matter."""
    if (directory / NAME).exists():
        return False
    atomic.make_folder(directory)
    try:
        (directory / "history").mkdir()  # atomic: of several processes, one succeeds
    except FileExistsError:
        return False
    except OSError as error:
        raise atomic.write_error(directory / "history", needed=0, error=error) from error
    return True


def clear(directory: Path) -> Lock:
    """Delete the run in a directory, if it has one, and return the lock of the directory.

    Only files that a run writes are deleted. A missing directory is created.

    Raises:
        RunError: The directory has something that may not be a run, the run is from `gradwatch train`, a process writes
            to it, or it cannot be written.
    """
    history = directory / "history"
    if is_run := (directory / NAME).exists():
        refuse_trained(directory, Header.read(directory))  # it raises if the file is from another program
    elif _names(history) - {"lock"}:
        raise RunError(f"{directory} has a folder `history` but no {NAME}, so it is not a run: nothing was deleted")
    atomic.make_folder(history)
    held = lock.acquire(directory)
    for path in (path for pattern in WRITTEN for path in directory.glob(pattern) if is_run):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            held.release()
            raise atomic.write_error(path, needed=0, error=error) from error
    return held


def refuse_trained(directory: Path, header: Header) -> None:
    """Refuse a run from `gradwatch train`, whose checkpoints belong to its history.

    Raises:
        RunError: The run is from `gradwatch train`.
    """
    if header.info.data is not None:
        raise RunError(
            f"{directory} is a run of `gradwatch train`: continue it with `gradwatch train --resume {directory}`, or "
            "choose another directory"
        )


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
