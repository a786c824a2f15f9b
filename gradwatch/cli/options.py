"""Define the options and the exit code that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from gradwatch.records import Finding

FINDINGS = 1
INTERRUPTED = 3

OUTPUT = "Output"
THRESHOLDS = "Thresholds"
"""Titles of panels in the help."""

FailOn = Literal["info", "warning", "critical", "never"]
"""Lowest severity of a finding that makes the exit code 1."""
FormatOption = Annotated[
    Literal["text", "json"],
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Output format: `text` for people or `json` for programs.",
        rich_help_panel=OUTPUT,
    ),
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


def exit_code(findings: Iterable[Finding], fail_on: FailOn) -> int:
    """Return 1 if a finding is at least as severe as `fail_on`, else 0."""
    from gradwatch.records import Severity

    if fail_on == "never":
        return 0
    return FINDINGS if any(f.severity >= Severity.parse(fail_on) for f in findings) else 0
