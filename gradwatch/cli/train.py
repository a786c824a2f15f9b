"""`gradwatch train`: train from a config, or continue an interrupted run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradwatch.cli import ranks
from gradwatch.cli.command import suggest_set
from gradwatch.cli.options import INTERRUPTED, OUTPUT, FailOnOption, SetFileOption, SetOption, exit_code
from gradwatch.cli.output.console import print_message
from gradwatch.cli.output.errors import show_notes
from gradwatch.errors import GradwatchError, OutOfMemoryError, RunError, did_you_mean
from gradwatch.paths import RUN_CONFIG

if TYPE_CHECKING:
    from gradwatch.config.sections.root import Config
    from gradwatch.train.training_state import TrainingState


def command(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="YAML file. Omit it with --resume, which uses the run's config.", show_default=False
        ),
    ] = None,
    overrides: SetOption = None,
    set_files: SetFileOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run from its last checkpoint.", show_default=False),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Start N ranks on this machine with torchrun; `train.parallel` says how they share the training.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[Path | None, typer.Option("--directory", hidden=True)] = None,
    fail_on: FailOnOption = "critical",
    log_format: Annotated[
        Literal["auto", "rich", "plain", "json"],
        typer.Option(
            metavar="FORMAT",
            help="Progress as `rich`, `plain` or `json`; `auto` is `rich` on a terminal, else `plain`.",
            rich_help_panel=OUTPUT,
        ),
    ] = "auto",
) -> None:
    """Train a model from a YAML config, monitor its gradients, and save everything to a run directory.

    Exit codes: 0 healthy, 1 findings at or above --fail-on, 2 a mistake in the config or out of memory, 3 interrupted:
    `gradwatch train --resume RUN` continues.
    """
    try:
        from gradwatch.config.ineffective import ineffective_settings
        from gradwatch.config.load import load_config

        file = _file(config, resume)
        checked = load_config(file, overrides or [], changes=set_files or [], is_new=resume is None)
        if nproc and nproc > 1:
            _check_start(checked, nproc)
            from gradwatch.train.loop import new_directory

            directory = resume or new_directory(checked)  # here, so that this process knows the run of its ranks
            options = _options(overrides, set_files, fail_on=fail_on, log_format=log_format)
            place = [str(config), f"--directory={directory}"] if config else [f"--resume={directory}"]
            raise typer.Exit(ranks.start(["train", *place, *options], ranks=nproc, directory=directory))
        if ranks.is_printing_rank():
            for warning in ineffective_settings(checked):
                print_message("warning", warning)

        from gradwatch.train.loop import train  # torch, now that the config is known to be right

        checked = _settled(checked, lambda given: load_config(file, given, changes=set_files or []), overrides or [])
        outcome = train(checked, resume=resume, directory=directory, log_format=log_format, forecast=_forecast)
    except OutOfMemoryError as error:
        if ranks.is_printing_rank():
            from gradwatch.cli.output.out_of_memory import print_failed_step

            print_failed_step(error, file, overrides or [], set_files or [])
        raise
    except KeyboardInterrupt as quit_at_once:  # the second Ctrl-C, or one before training
        if not hasattr(quit_at_once, "__notes__"):
            quit_at_once.add_note("interrupted before training began; nothing was lost")
        if ranks.is_printing_rank():
            show_notes(quit_at_once)
        raise
    if outcome.ending == "interrupted":
        if ranks.is_printing_rank():
            print_message("note", f"interrupted; to continue: gradwatch train --resume {outcome.directory}")
        raise typer.Exit(INTERRUPTED)
    if checked.run.worst_samples and checked.train.parallel == "none" and _has_report(checked):
        from gradwatch.cli.output.worst_samples import add_worst_samples

        add_worst_samples(outcome.directory, outcome.history, outcome.diagnoses, count=checked.run.worst_samples)
    # rank 0 has the findings of a training
    raise typer.Exit(exit_code(outcome.history.findings, fail_on) if ranks.is_printing_rank() else 0)


def _forecast(training: TrainingState) -> int | None:
    """Return the planned peak of a training that has ended; planning is loaded only now."""
    from gradwatch.planning.forecast import planned_peak

    return planned_peak(training)


def _settled(config: Config, load: Callable[[list[str]], Config], overrides: list[str]) -> Config:
    """Return a config whose budget for activations is replaced with the setting that the plan chose."""
    section = config.train.activation_checkpointing
    if section == "none" or section == "sqrt" or section.budget is None:
        return config
    import json

    from gradwatch.planning.checkpointing import KEY, settle
    from gradwatch.planning.training import ConfigPlanner
    from gradwatch.render.common.format import shown_size

    def changed(changes: Mapping[str, Any]) -> Config:
        return load([*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])

    planner = ConfigPlanner(changed)
    if choice := settle(planner):
        planned = f"{shown_size(choice.peak_bytes)} planned of {section.budget}"
        print_message("note", f"{KEY}: {choice.text}: {planned}")
    return planner.config


def _has_report(config: Config) -> bool:
    return bool(config.sinks.get("html", {}).get("enabled", True))


def _check_start(config: Config, nproc: int) -> None:
    """Raise a GradwatchError if the ranks could not start, before torch is loaded for each of them."""
    if ranks.is_rank():
        raise GradwatchError("--nproc: a launcher has already started several ranks; remove one of the two")
    from gradwatch.train.parallel.environment import check_parallel

    check_parallel(config.train, nproc)


def _options(overrides: list[str] | None, set_files: list[Path] | None, *, fail_on: str, log_format: str) -> list[str]:
    """Return the options of this call for the ranks."""
    repeated = [("--set", text) for text in overrides or ()] + [("--set-file", str(file)) for file in set_files or ()]
    once = [("--fail-on", fail_on), ("--log-format", log_format)]
    return [f"{name}={value}" for name, value in (*repeated, *once)]


def _file(config: Path | None, resume: Path | None) -> Path:
    """Return the file to read: the given config, or the config of the run to continue."""
    if config and not resume:
        if (hint := suggest_set(str(config))) and not config.exists():
            raise GradwatchError(f"train: got {config} as CONFIG, expected a YAML file{hint}")
        return config
    if config or not resume:
        raise typer.BadParameter("give either a config, or --resume with a run directory")
    if not resume.is_dir():
        near = did_you_mean(resume.name, [p.name for p in resume.parent.glob("*/")])
        raise RunError(f"--resume: there is no run directory {resume}{near}")
    file = resume / RUN_CONFIG
    if not file.is_file():
        runs = sorted(p.parent for p in resume.glob("*/config.yaml"))
        inside = f"; it contains runs, the newest is {runs[-1]}" if runs else ""
        raise RunError(f"--resume: {resume} is not a run of `gradwatch train`: it has no config.yaml{inside}")
    return file
