"""Options that several commands share, and the exit code that they agree on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from gradwatch.records import Finding

FINDINGS = 1
INTERRUPTED = 3


FailOn = Literal["info", "warning", "critical", "never"]
"""Least severity of a finding that makes the exit code 1."""
FormatOption = Annotated[Literal["text", "json"], typer.Option("--format", help="For people, or for programs.")]
FailOnOption = Annotated[FailOn, typer.Option("--fail-on", help="Exit with 1 where a finding is at least this severe.")]


def exit_code(findings: Iterable[Finding], fail_on: FailOn) -> int:
    """Return 1 where a finding is at least as severe as `fail_on`, else 0."""
    from gradwatch.records import Severity

    if fail_on == "never":
        return 0
    return FINDINGS if any(f.severity >= Severity.parse(fail_on) for f in findings) else 0
