"""`gradwatch run`: watch an unedited training script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwatch.autowatch.launch import Target, launch
from gradwatch.autowatch.settings import ScriptSettings
from gradwatch.cli.options import RUNS
from gradwatch.paths import user_path

"""Folder of new runs, where `gradwatch diagnose` looks for the newest."""


def command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="`train.py`, `python train.py` or `python -m package.module`, with its arguments.",
            show_default=False,
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Run directory; by default `runs/SCRIPT`, or the next free name.", show_default=False
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what `gradwatch replay` needs to run a bad step again.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="Record every operation, which is slow: an error of a backward pass about a tensor that was changed "
            "in place then names the line that saved it and the line that wrote to it.",
        ),
    ] = False,
    total_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Planned optimizer steps, if known.", show_default=False)
    ] = None,
) -> None:
    """Run a training script, and watch it without editing it.

    The models, optimizers, losses and steps of the script are found. The script keeps its output, its random numbers
    and its exit code.
    """
    target = Target(words)
    directory = user_path(run) if run else RUNS / target.name
    settings = ScriptSettings(
        run=str(Path.cwd() / directory), record=record, total_steps=total_steps, in_place=in_place
    )
    raise typer.Exit(launch(target, settings))
