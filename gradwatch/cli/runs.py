"""`gradwatch runs`: list saved runs with their health."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from gradwatch.cli.options import OUTPUT, FormatOption
from gradwatch.cli.output.console import output, print_message, write

SortKey = Literal["created", "name", "verdict", "status", "steps", "loss", "val_loss", "val_accuracy"]


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of runs, or a single run.")] = Path("runs"),
    sort: Annotated[
        SortKey,
        typer.Option(
            metavar="KEY",
            help="Sort by `created` (newest first), `name`, `verdict` (worst first), `status`, `steps`, `loss`, "
            "`val_loss` or `val_accuracy`.",
            rich_help_panel=OUTPUT,
        ),
    ] = "created",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the sort order.", rich_help_panel=OUTPUT)] = False,
    form: FormatOption = "text",
) -> None:
    """List saved runs with their health, steps, final metrics, age and findings.

    Prints a table on a terminal; otherwise one line per run, with columns separated by tabs, path and status first.
    Damaged runs are reported on standard error, and the others are listed.

    Exit codes: 0 listed, 2 no such folder.
    """
    from gradwatch.errors import RunError
    from gradwatch.history.disk.run_summary import RunSummary, directories, summarize
    from gradwatch.render.terminal import runs

    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder; name the folder of your runs: gradwatch runs DIR")
    seen: list[RunSummary] = []
    damaged: list[tuple[str, str]] = []
    for directory in directories(folder):
        try:
            seen.append(summarize(directory))
        except RunError as error:
            damaged.append((str(directory), str(error)))
            print_message("warning", f"skipped a damaged run: {error}")
    rows, now = runs.ordered(seen, sort, reverse=reverse), datetime.datetime.now(datetime.UTC)
    if form == "json":
        write(runs.dumps(rows, damaged, now=now) + "\n")
        return
    if not rows:
        print_message("note", f"no runs in {folder}")
        return
    console = output()
    if console.is_terminal:  # else one line per run, for programs
        runs.print_runs(console, rows, now=now)
    else:
        write(runs.lines(rows, now=now))
