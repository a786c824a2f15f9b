"""`gradwatch run`: watch an unedited training script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwatch.autowatch.launch import Target, launch
from gradwatch.autowatch.settings import ScriptSettings
from gradwatch.cli.options import RUNS
from gradwatch.paths import user_path


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
        bool, typer.Option("--record", help="Save the state that `gradwatch replay` needs to run a bad step again.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="Record every operation, which is slow. If a backward pass fails because a tensor was modified in "
            "place, the error then names the line that saved the tensor and the line that modified it.",
        ),
    ] = False,
    total_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Planned optimizer steps, if known.", show_default=False)
    ] = None,
) -> None:
    """Run a training script, and watch it without editing it.

    gradwatch finds the models, optimizers, losses and steps of the script. The output, the random numbers and the exit
    code of the script stay the same.
    """
    target = Target(words)
    directory = user_path(run) if run else RUNS / target.name
    settings = ScriptSettings(
        run=str(Path.cwd() / directory), record=record, total_steps=total_steps, in_place=in_place
    )
    raise typer.Exit(launch(target, settings))
