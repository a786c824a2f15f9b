"""Options that several commands share, and the exit code that they agree on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gradwatch.records import Finding

FINDINGS = 1
INTERRUPTED = 3


class Format(StrEnum):
    """How a result is written."""

    TEXT = "text"
    JSON = "json"


class FailOn(StrEnum):
    """Least severity of a finding that makes the exit code 1."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"
    NEVER = "never"


FailOnOption = Annotated[FailOn, typer.Option("--fail-on", help="Exit with 1 where a finding is at least this severe.")]


def exit_code(findings: Iterable[Finding], fail_on: FailOn) -> int:
    """Return 1 where a finding is at least as severe as `fail_on`, else 0."""
    from gradwatch.records import Severity

    if fail_on is FailOn.NEVER:
        return 0
    return FINDINGS if any(f.severity >= Severity.parse(fail_on) for f in findings) else 0
