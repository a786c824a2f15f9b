"""`gradwatch runs`: list the saved runs with their health."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from gradwatch.cli.options import FormatOption
from gradwatch.cli.output.console import output, print_message, write

SortKey = Literal["created", "name", "verdict", "status", "steps", "loss", "val_loss", "val_accuracy"]


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of runs, or one run.")] = Path("runs"),
    sort: Annotated[
        SortKey, typer.Option(help="Newest, worst, longest, most accurate or lowest loss first; names from a to z.")
    ] = "created",
    reverse: Annotated[bool, typer.Option("--reverse", help="Turn the order round.")] = False,
    form: FormatOption = "text",
) -> None:
    """List the saved runs with health, steps, final metrics, age, and what was found.

    A table on a terminal; elsewhere a line each, its columns separated by tabs, path and status first. What is damaged
    is named on standard error, and the rest is listed. Exits with 2 where there is no such folder.
    """
    from gradwatch.errors import RunError
    from gradwatch.history.disk.run_summary import RunSummary, directories, summarize
    from gradwatch.render.terminal import runs

    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder; name the one that your runs are in: gradwatch runs DIR")
    seen: list[RunSummary] = []
    damaged: list[tuple[str, str]] = []
    for directory in directories(folder):
        try:
            seen.append(summarize(directory))
        except RunError as error:
            damaged.append((str(directory), str(error)))
            print_message("warning", f"damaged run, left out: {error}")
    rows, now = runs.ordered(seen, sort, reverse=reverse), datetime.datetime.now(datetime.UTC)
    if form == "json":
        write(runs.dumps(rows, damaged, now=now) + "\n")
        return
    if not rows:
        print_message("note", f"{folder} holds no run")
        return
    console = output()
    if console.is_terminal:
        runs.print_runs(console, rows, now=now)
    else:
        write(runs.lines(rows, now=now))
