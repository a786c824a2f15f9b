"""Find the newest run, for commands without a RUN argument."""

from __future__ import annotations

from pathlib import Path

from gradwatch.cli.output.console import print_message
from gradwatch.errors import GradwatchError, RunError

RUNS = Path("runs")
"""Folder to search: the default of `run.out`."""


def run_or_newest(run: Path | None, *, command: str) -> Path:
    """Return the given run or, without one, the newest run under `runs/`, and note it on standard error.

    Args:
        run: Run directory as given, or None.
        command: Name of the calling command, for the message.

    Raises:
        GradwatchError: No run was given, and there is none under `runs/`.
    """
    if run:
        return run
    newest = _newest(RUNS)
    if not newest:
        raise GradwatchError(
            f"{command}: no RUN given, and there is no run under {RUNS}/; name a run directory: gradwatch {command} RUN"
        )
    print_message("note", f"no RUN given; using the newest: {newest}")
    return newest


def _newest(folder: Path) -> Path | None:
    """Return the run that was created last; damaged runs do not count."""
    from gradwatch.history.disk.run_summary import RunSummary, directories, summarize

    found: list[RunSummary] = []
    for directory in directories(folder) if folder.is_dir() else ():
        try:
            found.append(summarize(directory))
        except RunError:
            continue  # `gradwatch runs` reports it
    return max(found, key=lambda run: run.created).path if found else None
