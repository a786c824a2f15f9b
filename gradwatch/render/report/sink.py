"""Write report.html: a run on one page that needs no network, with findings, layers by step, and remedies."""

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
    path: Path,
    history: History,
    diagnoses: Sequence[Diagnosis],
    *,
    run: Path | None = None,
    config_text: str = "",
    changed_text: str = "",
) -> None:
    """Write the report of a run to a file, which is replaced atomically. Further arguments as for `page`.

    Raises:
        RunError: The file cannot be written.
    """
    # atomic: a crash or a full disk never leaves half a page
    text = page(history, diagnoses, run=run, config_text=config_text, changed_text=changed_text)
    atomic.replace(path, text.encode("utf-8"))


@final
class Html:
    """Writes report.html into the run directory when the run ends.

    Args:
        directory: Run directory.
        config_text: Text of the config, to show.
        changed_text: The settings in it that differ from the defaults.
    """

    every = 0  # no step is due: only `close` writes

    def __init__(self, *, directory: Path, config_text: str = "", changed_text: str = "") -> None:
        self._directory = directory
        self._texts = {"config_text": config_text, "changed_text": changed_text}

    def write(self, history: History) -> None:
        """Do nothing: the report covers the whole run."""

    def report(self, finding: Finding) -> None:
        """Do nothing: the report covers the whole run."""

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Write the report of the run, if the run has a step. If that fails, warn with a command to write it later."""
        if history.step < 0:  # nothing to show
            return
        try:
            path, run = self._directory / NAME, self._directory
            write_report(path, history, diagnoses, run=run, **self._texts)
        except RunError as error:  # the run itself is recorded, so the report can still be written later
            warnings.warn(
                f"gradwatch: could not write the report: {error}. Write it later with: "
                f"gradwatch diagnose {self._directory} --format html",
                RuntimeWarning,
                stacklevel=2,
            )
