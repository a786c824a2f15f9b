"""`gradwatch diagnose`: say what is wrong with a recorded run, and what to change."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwatch.cli.console import complain, output, write
from gradwatch.cli.options import FailOn, FailOnOption, exit_code

if TYPE_CHECKING:
    from gradwatch.history.store import History


class Format(StrEnum):
    """How the diagnosis is written."""

    TEXT = "text"
    JSON = "json"


def command(
    run: Annotated[Path, typer.Argument(help="Run directory, finished or not.", show_default=False)],
    form: Annotated[Format, typer.Option("--format", help="For people, or for programs.")] = Format.TEXT,
    fail_on: FailOnOption = FailOn.WARNING,
    redetect: Annotated[
        bool, typer.Option("--redetect", help="Run today's detectors over the recorded numbers again.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="detect.KIND.FIELD=VALUE",
            help="Change a threshold and detect again: `--set detect.dead-layer.every=5`. Repeatable.",
        ),
    ] = None,
) -> None:
    """Say what is wrong with a recorded run: evidence, causes, how to confirm them, and the change that mends it.

    Exits with 0 where the run is healthy, 1 with findings, 2 where there is no such run.
    """
    from gradwatch.diagnose.rank import diagnose
    from gradwatch.history.disk import read

    history = read(run)
    if ending := _ending(run):
        complain("note", ending)
    if redetect or overrides:
        history = _redetected(history, run, overrides or [])
    diagnoses = diagnose(history)
    if form is Format.JSON:
        from gradwatch.render import json

        write(json.dumps(history, diagnoses) + "\n")
    else:
        from gradwatch.render.terminal import print_diagnosis

        print_diagnosis(output(), history, diagnoses)
    raise typer.Exit(exit_code(history.findings, fail_on))


def _ending(run: Path) -> str:
    """Return how a run ended that is not finished, and how to go on with it; an empty string for one that is."""
    from gradwatch.history.disk import status

    told = {
        "running": "the run is going on, or its process was killed",
        "interrupted": "the run was interrupted",
        "failed": "the run ended with an error",
    }.get(status(run), "")
    can_resume = told and any((run / "checkpoints").glob("step-*"))
    return f"{told}; to go on with it: gradwatch train --resume {run}" if can_resume else told


def _redetected(history: History, run: Path, overrides: list[str]) -> History:
    """Return the recorded numbers with what the detectors find in them now, at the run's thresholds and overrides."""
    from gradwatch.config.load import load_detect
    from gradwatch.detect import detectors
    from gradwatch.pipeline import redetect

    config = run / "config.yaml"
    settings = load_detect(config if config.is_file() else None, overrides)
    return redetect(history, detectors(settings))
