"""Write and read a run directory: run.json, rows in history/, findings and events in .jsonl files."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self, final

from gradwatch.errors import RunError, raised
from gradwatch.history.disk import atomic, lock, segments
from gradwatch.history.disk.events import EVENTS
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.history.disk.header import NAME, Header, shared_tables
from gradwatch.history.disk.lock import Lock
from gradwatch.history.ending import Ending, Status
from gradwatch.history.store import History
from gradwatch.records import Event, Finding

MAX_REASON = 400
"""Maximum number of characters of an error in run.json."""


@final
class Writer:
    """Writes a growing run to disk.

    Every row, finding and event is passed to the kernel at once, so that a kill loses none. The number of rows is
    bounded; see `thinning`.

    Args:
        directory: The run directory, created if it is missing. It must not contain a run; see `resume`.
        history: The history to write.
        held_lock: Lock of the caller on the directory; None to create the run.

    Raises:
        RunError: The directory contains a run, or cannot be written.
    """

    def __init__(self, directory: Path, history: History, *, held_lock: Lock | None = None) -> None:
        self._lock = _create(directory) if held_lock is None else held_lock
        self._directory = directory
        self._history = history
        history.directory = directory
        self._is_closed = False
        Header.of(history, "running").write(directory)
        self._open_files()

    def _open_files(self) -> None:
        self._writers = self._segment_writers()
        self._findings = atomic.open_at_end(self._directory / FINDINGS.name)
        self._events = atomic.open_at_end(self._directory / EVENTS.name)

    def _segment_writers(self) -> list[segments.SegmentWriter]:
        return [
            segments.SegmentWriter(self._directory / "history" / folder, tables)
            for folder, tables in shared_tables(self._history).items()
        ]

    def _close_files(self) -> None:
        for writer in self._writers:
            writer.close()
        os.close(self._findings)
        os.close(self._events)

    @classmethod
    def resume(cls, directory: Path, step: int | None) -> tuple[Self, History]:
        """Continue a run after a step, and delete all later data.

        If the checkpoint has a `History.state`, pass it to `History.restore` next. The steps before the checkpoint may
        have been thinned on disk after it. The history is then equal to the history of an uninterrupted run.

        Args:
            directory: A run directory.
            step: Newest optimizer step to keep. Later rows, findings and events are deleted. None keeps all.

        Returns:
            The writer, and the history up to and including the step.

        Raises:
            RunError: There is no run, it cannot be read or written, or another process is writing to it.
        """
        header = Header.read(directory)
        with contextlib.ExitStack() as on_error:
            held_lock = lock.acquire(directory)  # before the rows are read: no other process may write then
            on_error.callback(held_lock.release)
            history = _load(directory, header, until=step)
            if Header.of(history, "running").layouts != header.layouts:
                author = header.info.versions.get("gradwatch", "of another version")
                raise RunError(
                    f"{directory} was recorded by gradwatch {author}, with other statistics: resume with that"
                )
            # after all checks: a refused run stays as it is
            FINDINGS.truncate(directory, until=step)
            EVENTS.truncate(directory, until=step)
            history.ending = None  # the run goes on
            writer = cls(directory, history, held_lock=held_lock)
            on_error.pop_all()
        return writer, history

    def append(self) -> None:
        """Write the steps that are not on disk yet: at most `WINDOW` of them before the last `History.extend`."""
        for writer in self._writers:
            writer.append()

    def update_layout(self) -> None:
        """Write the layout of the rows again, after a change before the first row."""
        Header.of(self._history, "running").write(self._directory)
        for writer in self._writers:
            writer.close()
        self._writers = self._segment_writers()

    def report(self, finding: Finding) -> None:
        """Write a finding that the newest step of the history has opened, made more severe, or withdrawn."""
        line = FINDINGS.line(finding, at=self._history.step)
        size = os.fstat(self._findings).st_size
        atomic.append(self._findings, line, path=self._directory / FINDINGS.name, size=size)

    def add_event(self, event: Event) -> None:
        """Write an event of the newest step of the history."""
        line = EVENTS.line(event, at=self._history.step)
        atomic.append(self._events, line, path=self._directory / EVENTS.name, size=os.fstat(self._events).st_size)

    def rewind(self) -> None:
        """Delete all data on disk after the newest step of a truncated history."""
        self._close_files()  # truncating replaces the files, which the descriptors would not follow
        FINDINGS.truncate(self._directory, until=self._history.step)
        EVENTS.truncate(self._directory, until=self._history.step)
        self._open_files()  # new segment writers delete the later rows

    def close(self, status: Status = "finished") -> None:
        """Write the final status and ending, close the files and release the lock. A second call does nothing.

        Args:
            status: Final status. The ending of the history says more, if it has this status.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._close_files()
        try:
            Header.of(self._history, status).write(self._directory)
        finally:  # also on a full disk
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        assert error, "the context manager protocol passes both"
        self._history.ending = ending_of(error)
        try:
            self.close(self._history.ending.status)
        except RunError as second:  # such as a full disk; the first error propagates
            warnings.warn(str(second), RuntimeWarning, stacklevel=2)


def ending_of(error: BaseException) -> Ending:
    """Return the ending of a run that an exception ended."""
    if isinstance(error, KeyboardInterrupt):
        return Ending(kind="interrupted")
    # one line: torch adds a stack in C++ to some errors
    return Ending(kind="failed", reason=" ".join(raised(error).split())[:MAX_REASON])


def read(directory: Path, *, until: int | None = None) -> History:
    """Return the history of a recorded run, live or finished.

    Args:
        directory: A run directory.
        until: Newest step to read, or None for all.

    Raises:
        RunError: There is no run, or it cannot be read. If only a part is damaged, a warning names the part and the
            rest is read.
    """
    return _load(directory, Header.read(directory), until=until)


def status(directory: Path) -> Status:
    """Return the status of a run: `running` also if its process was killed."""
    return Header.read(directory).ending.status


def _load(directory: Path, header: Header, *, until: int | None = None) -> History:
    history = History(header.info, groups=header.groups)
    history.ending = header.ending
    history.directory = directory
    problems: list[str] = []
    for folder, tables in shared_tables(history).items():
        layout = header.layouts[folder]
        parts, damage = segments.read(directory / "history" / folder, layout)
        for name, table in tables.items():
            segments.fill(table, parts, name=name, layout=layout)
        problems += damage
    if history.act.last_step > history.step:  # the run was written to between the two reads
        history.act.truncate(history.step)
    if until is not None:
        history.truncate(until)
    history.find_validations()
    # `report` keeps the first step of a finding and the highest severity, as in the live run
    findings, damage = FINDINGS.read(directory, until=until)
    for finding in findings:
        history.report(finding) if finding.withdrawn is None else history.withdraw(finding)
    problems += damage
    events, damage = EVENTS.read(directory, until=until)
    history.events.extend(events)
    if problems := problems + damage:
        text = f"{directory} is damaged; what is left of it was read. " + "; ".join(problems)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return history


def _create(directory: Path) -> Lock:
    """Create a directory for a new run, and return the lock."""
    if (directory / NAME).exists():
        raise RunError(f"{directory} already holds a run: resume it, or choose another directory")
    atomic.make_folder(directory / "history")
    return lock.acquire(directory)
