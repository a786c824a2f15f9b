"""`gradwatch plan`: tell the memory of a training before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwatch.cli.command import suggest_set
from gradwatch.cli.options import FormatOption, SetFileOption, SetOption
from gradwatch.cli.output.console import output, print_message, write
from gradwatch.cli.output.progress import progress_line
from gradwatch.errors import GradwatchError, RunError

if TYPE_CHECKING:
    from gradwatch.config.sections.root import Config
    from gradwatch.planning.advice import Advised
    from gradwatch.planning.result import Plan
    from gradwatch.planning.training import ConfigPlanner

DOES_NOT_FIT = 1


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)],
    overrides: SetOption = None,
    set_files: SetFileOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that the training may take, such as `8GB` or `24GiB`: also finds the largest batch and the "
            "changes that save memory. Without it, the limit is the memory of this machine.",
            show_default=False,
        ),
    ] = None,
    patch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the cheapest change that fits the budget to FILE, for `train --set-file FILE`.",
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
    if patch and not given:
        raise GradwatchError(f"--patch: got {patch} without a budget that the change has to fit; add --budget 8GB")
    from gradwatch.config.load import load_config

    load_config(config, overrides or [], changes=set_files or [], is_new=True)  # reports mistakes without torch

    import json

    from gradwatch.planning.checkpointing import KEY, settle
    from gradwatch.planning.machine import machine_memory
    from gradwatch.planning.training import ConfigPlanner

    def load(changes: Mapping[str, Any]) -> Config:
        settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        return load_config(config, [*(overrides or []), *settings], changes=set_files or [], is_new=True)

    planner = ConfigPlanner(load)
    if choice := settle(planner):
        print_message("note", f"{KEY}: {choice.text} ({json.dumps(choice.setting)})")
    plan = planner.plan()
    measured = planner.measure() if measure else None
    limit = given or machine_memory(plan.device)
    advised = _advised(planner, given, measured, hidden=form == "json") if given and (patch or form == "text") else None
    if advised and patch:
        _write_patch(advised, patch, config)
    if form == "json":
        write(json.dumps((measured or plan).to_json(), indent=1) + "\n")
    else:
        from gradwatch.cli.output.plan import print_advice, print_plan

        print_plan(output(), plan, limit=limit, measured=measured)
        if advised:
            print_advice(output(), advised, patch=patch)
        for note in plan.notes:
            print_message("note", note)
    raise typer.Exit(0 if plan.peak_bytes <= limit else DOES_NOT_FIT)


def _advised(planner: ConfigPlanner, budget: int, measured: Plan | None, *, hidden: bool) -> Advised | None:
    """Return what fits into a budget, or None if each change would have to run."""
    from gradwatch.planning.advice import Advisor

    if not planner.plan().is_traced:
        print_message("note", "no changes are tried, because each would have to run")
        return None
    with progress_line(hidden=hidden) as progress:
        return Advisor(planner, budget, progress=progress, measured=measured).advise()


def _write_patch(advised: Advised, path: Path, config: Path) -> None:
    """Write the cheapest change that fits to a file; if none is needed or fits, leave the file alone."""
    from gradwatch.history.disk import atomic
    from gradwatch.planning.size import shown_size
    from gradwatch.render.common.config_patch import patch_yaml

    if (best := advised.cheapest) is None:
        return
    lines = [
        f"# {best.text}: {shown_size(best.plan.peak_bytes)} fit in {shown_size(advised.budget)}",
        f"# Apply it: gradwatch train {config} --set-file {path}",
        patch_yaml(best.changes),
    ]
    try:
        atomic.replace(path, ("\n".join(lines) + "\n").encode())
    except RunError as error:
        raise RunError(f"--patch: {error}; choose another file") from error
