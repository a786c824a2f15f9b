"""Write a run directory as long as that succeeds: a full disk must not stop the training."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from gradwatch.errors import GradwatchError
from gradwatch.history.disk.header import Header
from gradwatch.history.disk.writer import Writer
from gradwatch.history.ending import Status
from gradwatch.history.store import History
from gradwatch.monitor.best_effort import warn_once
from gradwatch.records import Event, Finding


@final
class BestEffortWriter:
    """Writes a run to disk. The first failure ends the writing with one warning, and training continues.

    Args:
        writer: Writes the run.
        directory: The run directory.
        history: The history to write.
    """

    def __init__(self, writer: Writer, *, directory: Path, history: History) -> None:
        self.warned: set[str] = set()
        self._writer = writer
        self._directory = directory
        self._history = history
        self._pid = os.getpid()

    def append(self) -> None:
        """Write the newest step of the history."""
        self._attempt(self._writer.append)

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        self._attempt(functools.partial(self._writer.report, finding))

    def add_event(self, event: Event) -> None:
        """Write an event."""
        self._attempt(functools.partial(self._writer.add_event, event))

    def close(self, status: Status) -> None:
        """Write the final status of the run, and close its files."""
        # also after a failure, since it releases the lock of the directory
        self._attempt(functools.partial(self._writer.close, status), always=True)

    def update_layout(self) -> None:
        """Write the layout of the rows again, after the activations were found."""
        self._attempt(self._writer.update_layout)

    def rewrite_header(self) -> None:
        """Write the description of the run again."""
        self._attempt(lambda: Header.of(self._history, "running").write(self._directory))

    def _attempt(self, action: Callable[[], None], *, always: bool = False) -> None:
        # in a forked child, the files belong to the parent
        if (self.warned and not always) or os.getpid() != self._pid:
            return
        try:
            action()
        except (GradwatchError, OSError) as error:
            text = f"writing to {self._directory} is disabled: {type(error).__name__}: {error}"
            warn_once(self.warned, "writing", text)
