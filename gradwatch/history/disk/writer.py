"""A run on disk: run.json says what it is, history/ holds the rows, two .jsonl files what was found and noted."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self, final

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic, segments
from gradwatch.history.disk.events import EVENTS
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.history.disk.header import NAME, Header, Status, shared_tables
from gradwatch.history.store import History
from gradwatch.records import Event, Finding

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows: there, nothing stops two processes from writing to one run
    fcntl = None


@final
class Writer:
    """Writes a run down while it goes on.

    Every row, finding and event goes to the kernel at once: whatever kills the process, all that was appended is there.
    The number of rows is bounded, see `thinning`.

    Args:
        directory: The run directory; made where it is missing. It must not hold a run yet, see `resume`.
        history: What is written.
        lock: What `resume` holds of a run that is there already.

    Raises:
        RunError: The directory holds a run, or cannot be written.
    """

    def __init__(self, directory: Path, history: History, *, lock: int | None = None) -> None:
        self._lock = _claim(directory) if lock is None else lock
        self._directory = directory
        self._history = history
        self._closed = False
        Header.of(history, "running").write(directory)
        self._open()

    def _open(self) -> None:
        """Take up the files where the history stands."""
        self._writers = self._segment_writers()
        self._findings = atomic.open_at_end(self._directory / FINDINGS.name)
        self._events = atomic.open_at_end(self._directory / EVENTS.name)

    def _segment_writers(self) -> list[segments.SegmentWriter]:
        return [
            segments.SegmentWriter(self._directory / "history" / folder, tables)
            for folder, tables in shared_tables(self._history).items()
        ]

    def _let_go(self) -> None:
        """Close the files."""
        for writer in self._writers:
            writer.close()
        os.close(self._findings)
        os.close(self._events)

    @classmethod
    def resume(cls, directory: Path, step: int) -> tuple[Self, History]:
        """Go on with a run after a step, as if nothing had been recorded after it.

        Where a checkpoint holds `History.state`, give it to `History.restore` next: on disk, the steps before
        the checkpoint may have been thinned by those that came after it. Then the run agrees with one that was
        never interrupted, from the step on at which it was.

        Args:
            directory: A run directory.
            step: Newest optimizer step to keep; later rows, findings and events are deleted.

        Returns:
            The writer, and the history up to and with the step.

        Raises:
            RunError: There is no run, it cannot be read or written, or another process is writing to it.
        """
        header = Header.read(directory)
        with contextlib.ExitStack() as on_error:
            lock = _lock(directory)
            on_error.callback(os.close, lock)
            history = _load(directory, header, until=step)
            if Header.of(history, "running").layouts != header.layouts:
                author = header.info.versions.get("gradwatch", "of another version")
                raise RunError(
                    f"{directory} was recorded by gradwatch {author}, with other statistics: resume with that"
                )
            FINDINGS.truncate(directory, until=step)
            EVENTS.truncate(directory, until=step)
            writer = cls(directory, history, lock=lock)
            on_error.pop_all()
        return writer, history

    def append(self) -> None:
        """Write the steps that have not been written yet: at most `WINDOW` of them, and those that were laid last."""
        for writer in self._writers:
            writer.append()

    def update_layout(self) -> None:
        """Write down how the rows of the history lie, which changed before the first of them."""
        Header.of(self._history, "running").write(self._directory)
        for writer in self._writers:
            writer.close()
        self._writers = self._segment_writers()

    def report(self, finding: Finding) -> None:
        """Write a finding, as made at the newest step of the history."""
        line = FINDINGS.line(finding, at=self._history.step)
        size = os.fstat(self._findings).st_size
        atomic.append(self._findings, line, path=self._directory / FINDINGS.name, size=size)

    def add_event(self, event: Event) -> None:
        """Write an event, as noted at the newest step of the history."""
        line = EVENTS.line(event, at=self._history.step)
        atomic.append(self._events, line, path=self._directory / EVENTS.name, size=os.fstat(self._events).st_size)

    def rewind(self) -> None:
        """Delete what was recorded after the newest step of the history, which was truncated."""
        self._let_go()
        FINDINGS.truncate(self._directory, until=self._history.step)
        EVENTS.truncate(self._directory, until=self._history.step)
        self._open()

    def close(self, status: Status = "finished") -> None:
        """End the run and let go of its files; nothing happens the second time."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        try:
            Header.of(self._history, status).write(self._directory)
        finally:
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
        except RunError as also:  # what went wrong first is what matters: a full disk, say
            warnings.warn(str(also), RuntimeWarning, stacklevel=2)


def read(directory: Path, *, until: int | None = None) -> History:
    """Return the history of a recorded run, live or finished.

    Args:
        directory: A run directory.
        until: Newest step to read: as if nothing had been recorded after it.

    Raises:
        RunError: It is none, or cannot be read. Where a part is damaged, a warning names it and the rest is read.
    """
    return _load(directory, Header.read(directory), until=until)


def status(directory: Path) -> Status:
    """Return how a run ended; `running` also where its process was killed."""
    return Header.read(directory).status


def _load(directory: Path, header: Header, *, until: int | None = None) -> History:
    history = History(header.info, groups=header.groups)
    problems: list[str] = []
    for folder, tables in shared_tables(history).items():
        layout = header.layouts[folder]
        parts, damage = segments.read(directory / "history" / folder, layout)
        for name, table in tables.items():
            segments.fill(table, parts, name=name, layout=layout)
        problems += damage
    if history.act.last_step > history.step:  # a live run went on while it was read
        history.act.truncate(history.step)
    if until is not None:
        history.truncate(until)
    history.find_validations()
    found, damage = FINDINGS.read(directory, until=until)
    for finding in found:
        history.report(finding)
    problems += damage
    noted, damage = EVENTS.read(directory, until=until)
    history.events.extend(noted)
    if problems := problems + damage:
        text = f"{directory} is damaged; what is left of it was read. " + "; ".join(problems)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return history


def claim_free(directory: Path) -> Path:
    """Make a run directory of this name, or of the next free one (`mine-2`, `mine-3`), which is named on stderr.

    Of several processes that ask for one name at the same time, each gets a directory of its own.

    Raises:
        RunError: It cannot be made.
    """
    path, number = directory, 1
    while not _is_claimed(path):
        number += 1
        path = directory.with_name(f"{directory.name}-{number}")
    if number > 1:
        sys.stderr.write(f"gradwatch: {directory} already holds a run; this one is written to {path}\n")
    return path


def _is_claimed(directory: Path) -> bool:
    """Make a directory for a run, and say whether it was still free; what else is in it does not matter."""
    if (directory / NAME).exists():
        return False
    atomic.make_folder(directory)
    try:
        (directory / "history").mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise atomic.unwritten(directory / "history", needed=0, error=error) from error
    return True


def _claim(directory: Path) -> int:
    """Make a directory for a new run, and return its lock."""
    if (directory / NAME).exists():
        raise RunError(f"{directory} already holds a run: resume it, or choose another directory")
    atomic.make_folder(directory / "history")
    return _lock(directory)


def _lock(directory: Path) -> int:
    """Take the right to write to a run, or say that another process has it. It is free again when its holder dies."""
    lock = atomic.open_at_end(directory / "history" / "lock")
    if fcntl is None:
        return lock
    # lockf, not flock: a forked data worker that outlives its parent would inherit that one
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(lock)
            raise RunError(f"{directory}: another process is writing to this run; stop it first") from error
    return lock
