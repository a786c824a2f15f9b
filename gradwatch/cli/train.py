"""`gradwatch train`: train a config under watch, or go on with an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gradwatch.cli.options import INTERRUPTED, FailOnOption, exit_code
from gradwatch.cli.output.console import print_message
from gradwatch.cli.output.errors import show_notes
from gradwatch.errors import RunError, did_you_mean


def command(
    config: Annotated[Path | None, typer.Argument(help="YAML file; not with --resume.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: `--set optim.lr=3e-4`. Repeatable."),
    ] = None,
    set_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--set-file", metavar="FILE", help="YAML file of changes, such as a cure; --set wins. Repeatable."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run directory to go on with from its last checkpoint.")
    ] = None,
    fail_on: FailOnOption = "critical",
    log_format: Annotated[
        Literal["auto", "rich", "plain", "json"],
        typer.Option(help="`auto` is `rich` on a terminal, `plain` elsewhere."),
    ] = "auto",
) -> None:
    """Train a model as a YAML config says, under watch, into a run directory.

    Exits with 0 where the run is healthy, 1 with findings, 2 on a mistake in the config, 3 where it was interrupted
    and can be resumed.
    """
    try:
        from gradwatch.config.ineffective import ineffective_settings
        from gradwatch.config.load import load_config

        checked = load_config(_file(config, resume), overrides or [], changes=set_files or [])
        for warning in ineffective_settings(checked):
            print_message("warning", warning)

        from gradwatch.train.loop import train  # torch, now that the config is known to be right

        outcome = train(checked, resume=resume, log_format=log_format)
    except KeyboardInterrupt as quit_at_once:  # the second Ctrl-C, or one before training
        if not hasattr(quit_at_once, "__notes__"):
            quit_at_once.add_note("interrupted before the training began; nothing was lost")
        show_notes(quit_at_once)
        raise
    if outcome.ending == "interrupted":
        print_message("note", f"interrupted; go on with: gradwatch train --resume {outcome.directory}")
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(exit_code(outcome.history.findings, fail_on))


def _file(config: Path | None, resume: Path | None) -> Path:
    """Return the file to read: the config that is named, or that of the run to go on with."""
    if config and not resume:
        return config
    if config or not resume:
        raise typer.BadParameter("give either a config, or --resume with a run directory")
    if not resume.is_dir():
        near = did_you_mean(resume.name, [p.name for p in resume.parent.glob("*/")])
        raise RunError(f"--resume: there is no run directory {resume}{near}")
    file = resume / "config.yaml"
    if not file.is_file():
        runs = sorted(p.parent for p in resume.glob("*/config.yaml"))
        inside = f"; it contains runs, the last of them {runs[-1]}" if runs else ""
        raise RunError(f"--resume: {resume} is no run of `gradwatch train`: it holds no config.yaml{inside}")
    return file
