"""`gradwatch plan`: tell the memory of a training before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwatch.cli.command import suggest_set
from gradwatch.cli.options import FormatOption
from gradwatch.cli.output.console import output, print_message, write
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.config.sections.root import Config

DOES_NOT_FIT = 1


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: `--set data.batch_size=256`. Repeatable."),
    ] = None,
    set_files: Annotated[
        list[Path] | None,
        typer.Option("--set-file", metavar="FILE", help="Change the settings that a YAML file names. Repeatable."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that the training may take, such as `8GB` or `24GiB`; by default, that of this machine.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run two steps as well, and show what they needed and their time.")
    ] = False,
    form: FormatOption = "text",
) -> None:
    """Tell the memory that a training needs before it runs, by part and by module, without using it.

    Exit codes: 0 it fits, 1 it does not fit, 2 a mistake in the config.
    """
    from gradwatch.planning.size import parse_size

    if (hint := suggest_set(str(config))) and not config.exists():
        raise GradwatchError(f"plan: got {config} as CONFIG, expected a YAML file{hint}")
    given = parse_size(budget, key="--budget") if budget else None
    from gradwatch.config.load import load_config

    load_config(config, overrides or [], changes=set_files or [], is_new=True)  # reports mistakes without torch

    import json

    from gradwatch.planning.machine import machine_memory
    from gradwatch.planning.training import ConfigPlanner

    def load(changes: Mapping[str, Any]) -> Config:
        settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        return load_config(config, [*(overrides or []), *settings], changes=set_files or [], is_new=True)

    planner = ConfigPlanner(load)
    plan = planner.plan()
    measured = planner.measure() if measure else None
    limit = given or machine_memory(plan.device)
    if form == "json":
        write(json.dumps((measured or plan).to_json(), indent=1) + "\n")
    else:
        from gradwatch.cli.output.plan import print_plan

        print_plan(output(), plan, limit=limit, measured=measured)
        for note in plan.notes:
            print_message("note", note)
    raise typer.Exit(0 if plan.peak_bytes <= limit else DOES_NOT_FIT)
