"""`gradwatch replay`: repeat a recorded step, and compare it with the recording."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from gradwatch.cli.options import FINDINGS, STEPS, FormatOption, RunArgument, run_or_newest, step_option
from gradwatch.cli.output.console import output, write_json
from gradwatch.paths import RUN_CONFIG


def command(
    run: RunArgument = None,
    step: Annotated[int | None, step_option("the first incident")] = None,
    until: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Last step: repeat all steps from --step to N.",
            show_default=False,
            rich_help_panel=STEPS,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="R",
            help="Rank to search for the first bad operation; by default the first rank that has one.",
            show_default=False,
            rich_help_panel=STEPS,
        ),
    ] = None,
    locate: Annotated[
        bool | None,
        typer.Option(
            "--locate/--no-locate",
            help="Find the first bad operation of the step; by default if its loss or gradient is NaN or Inf.",
            show_default=False,
            rich_help_panel=STEPS,
        ),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="Rank the samples of the step by leaving them out, and say whether they or the weights make its "
            "gradient large.",
            rich_help_panel=STEPS,
        ),
    ] = False,
    form: FormatOption = "text",
) -> None:
    """Repeat a training step from its saved state, check that it is bit-identical, and find what made it NaN.

    A step of several ranks is repeated in one process, and compared up to rounding.

    Exit codes: 0 every recorded number and the weights are the same, 1 something differs, 2 no such run or step.
    """
    from gradwatch.replay.locate_in_run import locate_in_run
    from gradwatch.replay.rerun import rerun

    run = run_or_newest(run, command="replay")
    if rank is not None and not (run / RUN_CONFIG).is_file():
        run = _part(run, rank)
    done = rerun(run, step=step, until=until)
    # the first bad step of several, else the replayed step
    bad = next((s.step for s in done.steps if not (math.isfinite(s.loss) and math.isfinite(s.norm))), None)
    searched = (
        locate_in_run(run, done.step if bad is None else bad, rank=rank)
        if locate or (locate is None and bad is not None)
        else None
    )
    ranking = None
    if samples:
        from gradwatch.replay.samples.ranking import rank_samples

        ranking = rank_samples(run, done.step)
    if form == "json":
        located = {"located": searched.to_json()} if searched else {}
        ranked = {"samples": ranking.to_json()} if ranking else {}
        write_json(done.to_json() | located | ranked)
    else:
        from gradwatch.cli.output.bad_operation import print_located
        from gradwatch.cli.output.rerun import print_rerun

        print_rerun(output(), done)
        if searched:
            output().print()
            print_located(output(), searched.located, step=searched.step, since=searched.since, rank=searched.rank)
        if ranking:
            from gradwatch.cli.output.samples import print_samples

            output().print()
            print_samples(output(), ranking)
    raise typer.Exit(0 if done.is_same else FINDINGS)


def _part(run: Path, rank: int) -> Path:
    """Return the directory of a rank of a user's own distributed loop."""
    from gradwatch.errors import RunError
    from gradwatch.history.disk.ranks import rank_parts

    parts = {0: run} | rank_parts(run)
    if rank not in parts:
        raise RunError(f"--rank: got {rank}, expected one of {', '.join(map(str, parts))}, the recorded ranks of {run}")
    return parts[rank]
