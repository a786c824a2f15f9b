"""`gradwatch replay`: run a recorded step again, and show whether it is the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from gradwatch.cli.options import FINDINGS, FormatOption
from gradwatch.cli.output.console import output, write


def command(
    run: Annotated[Path, typer.Argument(help="Run directory of `gradwatch train`.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Optimizer step, from 0: that of an incident, or any in reach of a checkpoint. By default the first "
            "incident's.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=0, help="Last step, where more than one is asked for.", show_default=False)
    ] = None,
    locate: Annotated[
        bool | None,
        typer.Option(
            "--locate/--no-locate",
            help="Name the step's first bad operation; by default where its loss or gradient is not finite.",
            show_default=False,
        ),
    ] = None,
    form: FormatOption = "text",
) -> None:
    """Run a step of a training again, from the state that was kept before it, and compare it with what was recorded.

    Exits with 0 where every recorded number and the weights came out again to the last bit, 1 where something differs,
    2 where there is no such run or step.
    """
    from gradwatch.replay.locate.in_run import locate_in_run
    from gradwatch.replay.rerun import rerun

    done = rerun(run, step=step, until=until)
    bad = next((s.step for s in done.steps if not (math.isfinite(s.loss) and math.isfinite(s.norm))), None)
    searched = (
        locate_in_run(run, done.step if bad is None else bad)
        if locate or (locate is None and bad is not None)
        else None
    )
    if form == "json":
        import json

        located = {"located": searched.to_json()} if searched else {}
        write(json.dumps(done.to_json() | located, indent=1) + "\n")
    else:
        from gradwatch.cli.output.bad_operation import print_located
        from gradwatch.cli.output.rerun import print_rerun

        print_rerun(output(), done)
        if searched:
            output().print()
            print_located(output(), searched.located, step=searched.step, since=searched.since)
    raise typer.Exit(0 if done.is_same else FINDINGS)
