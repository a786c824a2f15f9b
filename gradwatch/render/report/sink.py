"""report.html: a run on one page that needs no network, with its findings, its layers by step, and what to change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import final

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.report.page import page

NAME = "report.html"


def write_report(
    path: Path, history: History, diagnoses: Sequence[Diagnosis], *, run: Path | None = None, config_text: str = ""
) -> None:
    """Write the report of a run, whole or not at all.

    Args:
        path: The file; one that is there is replaced.
        history: The run, also one without a step.
        diagnoses: What explains its findings.
        run: Its directory, or None.
        config_text: Its config, if it has one.

    Raises:
        RunError: It could not be written.
    """
    atomic.replace(path, page(history, diagnoses, run=run, config_text=config_text).encode("utf-8"))


@final
class Html:
    """Writes report.html into the run directory when the run ends.

    Args:
        directory: The run directory.
        config_text: The config, shown as text.
    """

    every = 0

    def __init__(self, *, directory: Path, config_text: str = "") -> None:
        self._directory = directory
        self._config_text = config_text

    def write(self, history: History) -> None:
        """Do nothing: the report is of the whole run."""

    def report(self, finding: Finding) -> None:
        """Do nothing: the report is of the whole run."""

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Write the report of a run that has a step; where that fails, warn and say how to get it later."""
        if history.step < 0:
            return
        try:
            path, run = self._directory / NAME, self._directory
            write_report(path, history, diagnoses, run=run, config_text=self._config_text)
        except RunError as error:
            warnings.warn(
                f"gradwatch: could not write the report: {error}. Write it later with: "
                f"gradwatch diagnose {self._directory} --format html",
                RuntimeWarning,
                stacklevel=2,
            )
