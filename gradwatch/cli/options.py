"""Define the options and the exit code that several commands share, and find the run that they read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradwatch.cli.output.console import print_message
from gradwatch.errors import GradwatchError, RunError

if TYPE_CHECKING:
    from gradwatch.records import Finding

FINDINGS = 1
INTERRUPTED = 3
RUNS = Path("runs")
"""Folder to search: the default of `run.out`."""

OUTPUT = "Output"
SETTINGS = "Settings"
STEPS = "Steps"
THRESHOLDS = "Thresholds"
"""Titles of panels in the help."""

FailOn = Literal["info", "warning", "critical", "never"]
"""Lowest severity of a finding that makes the exit code 1."""
ReportFormat = Literal["text", "json", "html"]


def format_option(text: str) -> Any:
    """Return the option `--format`, with its values in words."""
    return typer.Option("--format", metavar="FORMAT", help=text, rich_help_panel=OUTPUT)


def output_option(text: str) -> Any:
    """Return the option `--output`, with the file in words."""
    return typer.Option("--output", metavar="FILE", help=text, show_default=False, rich_help_panel=OUTPUT)


FormatOption = Annotated[
    Literal["text", "json"], format_option("Output format: `text` for people or `json` for programs.")
]
FailOnOption = Annotated[
    FailOn,
    typer.Option(
        "--fail-on",
        metavar="SEVERITY",
        help="Exit with 1 if a finding is at least this severe: `info`, `warning`, `critical` or `never`.",
        rich_help_panel=THRESHOLDS,
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Run directory, finished or not; by default the newest under `runs/`.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the config: `--set optim.lr=3e-4`. Repeatable.",
        rich_help_panel=SETTINGS,
    ),
]
SetFileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--set-file",
        metavar="FILE",
        help="Apply the settings in a YAML file, such as one from `diagnose --patch`; --set wins. Repeatable.",
        rich_help_panel=SETTINGS,
    ),
]


def step_option(default: str) -> Any:
    """Return the option `--step` of a command that reads one step of a run, with its default in words."""
    return typer.Option(
        "--step",
        min=0,
        metavar="N",
        help=f"Optimizer step of the run, from 0; by default {default}.",
        show_default=False,
        rich_help_panel=STEPS,
    )


def exit_code(findings: Iterable[Finding], fail_on: FailOn) -> int:
    """Return 1 if a finding is at least as severe as `fail_on`, else 0."""
    from gradwatch.records import Severity

    if fail_on == "never":
        return 0
    return FINDINGS if any(f.severity >= Severity.parse(fail_on) for f in findings) else 0


def run_or_newest(run: Path | None, *, command: str) -> Path:
    """Return the given run or, without one, the newest run under `runs/`, and note it on standard error.

    Args:
        run: Run directory as given, or None.
        command: Name of the calling command, for the message.

    Raises:
        GradwatchError: No run was given, and there is none under `runs/`.
    """
    if run:
        return run
    newest = _newest(RUNS)
    if not newest:
        raise GradwatchError(
            f"{command}: no RUN given, and there is no run under {RUNS}/; name a run directory: gradwatch {command} RUN"
        )
    print_message("note", f"no RUN given; using the newest: {newest}")
    return newest


def _newest(folder: Path) -> Path | None:
    """Return the run that was created last; damaged runs do not count."""
    from gradwatch.history.disk.run_summary import RunSummary, directories, summarize

    found: list[RunSummary] = []
    for directory in directories(folder) if folder.is_dir() else ():
        try:
            found.append(summarize(directory))
        except RunError:
            continue  # `gradwatch runs` reports it
    return max(found, key=lambda run: run.created).path if found else None
