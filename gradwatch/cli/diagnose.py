"""`gradwatch diagnose`: say what is wrong with a recorded run, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gradwatch.cli.options import FailOnOption, exit_code
from gradwatch.cli.output.console import output, print_message, write
from gradwatch.cli.verify import VerifyOptions, verify_run

if TYPE_CHECKING:
    from gradwatch.history.store import History
    from gradwatch.records import Diagnosis


VERIFY = "Verify and cure"

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, finished or not.", show_default=False)]
FormatOption = Annotated[
    Literal["text", "json", "html"], typer.Option("--format", help="Text, JSON for programs, or an HTML page.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE", help="Where to write --format html; RUN/report.html by default.", show_default=False
    ),
]
RedetectOption = Annotated[
    bool, typer.Option("--redetect", help="Run the detectors of this version over the recorded numbers again.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="detect.KIND.FIELD=VALUE",
        help="Change a threshold and detect again: `--set detect.dead-layer.every=5`. Repeatable.",
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Verify the causes: run again with one change each, and check if the symptom goes.",
        rich_help_panel=VERIFY,
    ),
]
PatchOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Verify, and write the cure for `train --set-file`.",
        show_default=False,
        rich_help_panel=VERIFY,
    ),
]
TryOption = Annotated[
    int | None,
    typer.Option(
        "--try",
        min=1,
        metavar="N",
        help="Train N steps with the original config and with the cure, and compare them.",
        show_default=False,
        rich_help_panel=VERIFY,
    ),
]
SeedsOption = Annotated[int, typer.Option(min=1, help="For --try: number of seeds.", rich_help_panel=VERIFY)]
WithOption = Annotated[
    Path | None,
    typer.Option(
        "--with",
        metavar="FILE",
        help="For --try: compare this change instead of the cure.",
        show_default=False,
        rich_help_panel=VERIFY,
    ),
]
WithinOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time limit for --verify: start no new trial after SECONDS.",
        rich_help_panel=VERIFY,
    ),
]


def command(
    run: RunArgument,
    form: FormatOption = "text",
    target: OutputOption = None,
    fail_on: FailOnOption = "warning",
    redetect: RedetectOption = False,
    overrides: SetOption = None,
    verify: VerifyOption = False,
    patch: PatchOption = None,
    steps: TryOption = None,
    seeds: SeedsOption = 1,
    change: WithOption = None,
    within: WithinOption = 120.0,
) -> None:
    """Say what is wrong with a recorded run: evidence, causes, how to confirm them, and the change that mends it.

    With --verify, --patch or --try it is trained again, in temporary folders; the run directory stays as it is.

    Exits with 0 where the run is healthy, 1 with findings, 2 where there is no such run.
    """
    from gradwatch.diagnose.rank import diagnose
    from gradwatch.errors import GradwatchError
    from gradwatch.history.disk.writer import read

    if target and form != "html":
        raise GradwatchError(f"--output: got {target} with --format {form}, which is printed; add --format html")
    history = read(run)
    if ending := _ending(run):
        print_message("note", ending)
    if redetect or overrides:
        history = _redetected(history, run, overrides or [])
    diagnoses = diagnose(history)
    options = VerifyOptions(verify=verify, within_s=within, patch=patch, steps=steps, seeds=seeds, change=change)
    answer = verify_run(run, history, diagnoses, options) if options.is_any else None
    if form == "json":
        from gradwatch.render import json_document

        write(json_document.dumps(history, diagnoses, answer.to_json() if answer else {}, run=run) + "\n")
    elif form == "html":
        _write_report(target, run, history, diagnoses)
    else:
        from gradwatch.render.terminal.diagnosis import print_diagnosis

        print_diagnosis(output(), history, diagnoses, run=run)
        if answer:
            answer.show(output())
    raise typer.Exit(exit_code(history.findings, fail_on))


def _write_report(target: Path | None, run: Path, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
    """Write report.html into the run, or where it is wanted, and say where it is."""
    from gradwatch.errors import RunError
    from gradwatch.render.report.sink import NAME, write_report

    config, path = run / "config.yaml", target or run / NAME
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    try:
        write_report(path, history, diagnoses, run=run, config_text=text)
    except RunError as error:
        raise RunError(f"{error}; write it elsewhere with --output FILE") from error
    write(f"{path}\n")


def _ending(run: Path) -> str:
    """Return how a run ended that is not finished, and how to go on with it; an empty string for one that is."""
    from gradwatch.history.disk.writer import status

    ending = {
        "running": "the run is going on, or its process was killed",
        "interrupted": "the run was interrupted",
        "failed": "the run ended with an error",
    }.get(status(run), "")
    can_resume = ending and any((run / "checkpoints").glob("step-*"))
    return f"{ending}; to go on with it: gradwatch train --resume {run}" if can_resume else ending


def _redetected(history: History, run: Path, overrides: list[str]) -> History:
    """Return the recorded numbers with what the detectors find in them now, at the run's thresholds and overrides."""
    from gradwatch.config.load import load_detect
    from gradwatch.detect import detectors
    from gradwatch.pipeline.redetect import redetect

    config = run / "config.yaml"
    settings = load_detect(config if config.is_file() else None, overrides)
    return redetect(history, detectors(settings))
