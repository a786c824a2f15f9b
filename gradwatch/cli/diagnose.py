"""`gradwatch diagnose`: say what is wrong with a recorded run, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwatch.cli.options import (
    OUTPUT,
    THRESHOLDS,
    FailOnOption,
    ReportFormat,
    RunArgument,
    exit_code,
    format_option,
    output_option,
    run_or_newest,
)
from gradwatch.cli.output.console import output, print_message, write
from gradwatch.cli.output.progress import progress_line
from gradwatch.cli.output.verify_run import VerifyOptions, verify_run
from gradwatch.paths import RUN_CONFIG

if TYPE_CHECKING:
    from gradwatch.history.ending import Ending
    from gradwatch.history.store import History
    from gradwatch.records import Diagnosis


VERIFY = "Verify and fix"
"""Title of a panel in the help."""

FormatOption = Annotated[
    ReportFormat,
    format_option("Output format: `text` for people, `json` for programs, or `html` for a report page."),
]
OutputOption = Annotated[Path | None, output_option("File for --format html; by default RUN/report.html.")]
FullOption = Annotated[
    bool,
    typer.Option(
        "--full",
        help="Print everything: layers, trends, all evidence, other causes, and how to confirm each cause.",
        rich_help_panel=OUTPUT,
    ),
]
RedetectOption = Annotated[
    bool,
    typer.Option(
        "--redetect",
        help="Run this version's detectors on the recorded numbers again.",
        rich_help_panel=THRESHOLDS,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a threshold and detect again: `--set detect.dead-layer.every=5`. Repeatable.",
        rich_help_panel=THRESHOLDS,
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Test each likely cause: train again with one change, and check whether the symptom goes away.",
        rich_help_panel=VERIFY,
    ),
]
PatchOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Verify, and write the fix to FILE, for `train --set-file FILE`.",
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
        help="Train N steps with and without the fix, and compare them.",
        show_default=False,
        rich_help_panel=VERIFY,
    ),
]
SeedsOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="With --try: number of seeds to compare.", rich_help_panel=VERIFY)
]
WithOption = Annotated[
    Path | None,
    typer.Option(
        "--with",
        metavar="FILE",
        help="With --try: compare the change in FILE instead of the fix that was found.",
        show_default=False,
        rich_help_panel=VERIFY,
    ),
]
WithinOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time budget for --verify; no new experiment starts after it.",
        rich_help_panel=VERIFY,
    ),
]


def command(
    run: RunArgument = None,
    form: FormatOption = "text",
    target: OutputOption = None,
    full: FullOption = False,
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
    """Diagnose a recorded run: show what is wrong, the evidence, the likely causes and the fix.

    --verify, --patch and --try train again in temporary folders; the run directory does not change.

    Exit codes: 0 healthy, 1 findings at or above --fail-on, 2 no such run.
    """
    from gradwatch.config.settings import with_settings
    from gradwatch.diagnose.rank import diagnose
    from gradwatch.errors import GradwatchError
    from gradwatch.history.disk.run_summary import ending_of
    from gradwatch.history.disk.writer import read

    if target and form != "html":
        raise GradwatchError(f"--output: got {target} with --format {form}, which is printed; add --format html")
    run = run_or_newest(run, command="diagnose")
    history = with_settings(read(run), run)
    history.ending = ending_of(run)
    if note := _how_to_continue(run, history.ending) if history.step >= 0 or history.findings else _restart(run):
        print_message("note", note)
    if redetect or overrides:
        history = _redetected(history, run, overrides or [])
    diagnoses = diagnose(history)
    options = VerifyOptions(verify=verify, within_s=within, patch=patch, steps=steps, seeds=seeds, change=change)
    answer = None
    if options.is_any:
        with progress_line(hidden=form == "json") as progress:
            answer = verify_run(run, history, diagnoses, options, progress=progress)
        diagnoses = answer.mark_remedies(diagnoses)
    if form == "json":
        from gradwatch.render import json_document

        write(json_document.dumps(history, diagnoses, answer.to_json() if answer else {}, run=run) + "\n")
    elif form == "html":
        _write_report(target, run, history, diagnoses)
    else:
        _print_text(run, history, diagnoses, full=full)
        if answer:
            answer.show(output())
    raise typer.Exit(exit_code(history.findings, fail_on))


def _print_text(run: Path, history: History, diagnoses: tuple[Diagnosis, ...], *, full: bool) -> None:
    """Print the diagnosis for people: on one screen, or everything."""
    if full:
        from gradwatch.render.terminal.diagnosis import print_diagnosis

        print_diagnosis(output(), history, diagnoses, run=run)
    else:
        from gradwatch.render.terminal.summary import print_summary

        print_summary(output(), history, diagnoses, run_dir=run)


def _write_report(target: Path | None, run: Path, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
    """Write report.html into the run directory, or to `target`, and print its path."""
    from gradwatch.cli.output.report import write_run_report
    from gradwatch.errors import RunError

    try:
        path = write_run_report(target, run, history, diagnoses)
    except RunError as error:
        raise RunError(f"{error}; write it elsewhere with --output FILE") from error
    write(f"{path}\n")


def _how_to_continue(run: Path, ending: Ending) -> str:
    """Return how to continue a run that did not reach its planned end; an empty string if that is impossible."""
    if ending.kind == "running":
        return "the run is still in progress"
    if ending.kind == "finished" or not any((run / "checkpoints").glob("step-*")):
        return ""
    setting = " --set train.early_stop=null" if ending.kind == "early-stop" else ""
    return f"to continue the run: gradwatch train --resume {run}{setting}"


def _restart(run: Path) -> str:
    """Return what to do about a run without a step."""
    config = run / RUN_CONFIG
    again = f"train it again: gradwatch train {config}" if config.is_file() else "call monitor.step(loss) in the loop"
    return f"no step was recorded, so there is nothing to diagnose; {again}"


def _redetected(history: History, run: Path, overrides: list[str]) -> History:
    """Run the detectors on the recorded numbers again, at the run's thresholds and with the overrides."""
    from gradwatch.config.load import load_detect
    from gradwatch.detect import detectors
    from gradwatch.pipeline.redetect import redetect

    config = run / RUN_CONFIG
    # only the section `detect`: problems in other sections do not matter here
    settings = load_detect(config if config.is_file() else None, overrides)
    return redetect(history, detectors(settings))
