"""Read the new steps and events of a run that another process writes."""

from __future__ import annotations

from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import RunError
from gradwatch.history.disk import lock, segments
from gradwatch.history.disk.events import EVENTS
from gradwatch.history.disk.header import NAME, Header
from gradwatch.records import Event

FOLDER = "steps"
"""Folder of the records with a row per step; see `header.SHARED`."""


@final
class Tail:
    """Follows a growing run directory. Neither a missing run nor a damaged file is an error: there is nothing to read.

    Args:
        directory: Run directory of the other process, which may not exist yet.

    Attributes:
        last_step: Newest step that was read, or -1 before the first.
    """

    def __init__(self, directory: Path) -> None:
        self.last_step = -1
        self._directory = directory
        self._header: Header | None = None

    @property
    def header(self) -> Header | None:
        """The description of the run, or None if there is no run yet."""
        if self._header is None and (self._directory / NAME).exists():
            self._header = self._read_header()
        return self._header

    @property
    def is_ended(self) -> bool:
        """Return whether the other process has closed its run."""
        header = self._read_header()
        return header is not None and header.ending.status != "running"

    @property
    def is_killed(self) -> bool:
        """Return whether the other process has died without closing its run, according to its lock."""
        return self.header is not None and not self.is_ended and not lock.is_held(self._directory)

    def read(self) -> NDArray[np.void] | None:
        """Return the records of the steps since the last call, oldest first; None if there are none."""
        header = self.header
        if header is None:
            return None
        parts = segments.read_since(self._directory / "history" / FOLDER, header.layouts[FOLDER], self.last_step)
        records_T = np.concatenate(parts) if parts else None
        if records_T is None or not len(records_T):
            return None
        self.last_step = int(records_T["step"][-1])
        return records_T

    def events(self) -> list[Event]:
        """Return all events of the run so far."""
        try:
            return EVENTS.read(self._directory)[0]
        except OSError:
            return []

    def _read_header(self) -> Header | None:
        try:
            return Header.read(self._directory)
        except RunError:
            return None
