"""Style findings for a terminal: a sign and a word for each severity, and a color that repeats them."""

from __future__ import annotations

from rich.text import Text

from gradwatch.records import Finding, Severity
from gradwatch.render.common.sparkline import BROKEN, Glyphs

# names of the 16 ANSI colors, which the theme of a terminal adapts to its background; fixed colors fit few themes
OK = "green"
SEVERITY = {Severity.INFO: "cyan", Severity.WARNING: "bold yellow", Severity.CRITICAL: f"bold {BROKEN}"}
CODE = "cyan"
"""Style of settings and lines of code to copy."""


def mark(severity: Severity | None, signs: Glyphs) -> Text:
    """Return the sign of a severity, one column wide; None is healthy."""
    return Text(signs.ok, OK) if severity is None else Text(signs.marks[severity], SEVERITY[severity])


def sentence(finding: Finding, signs: Glyphs) -> Text:
    """Return a finding as one line: sign, onset, severity, kind, layers and message."""
    text = Text.assemble(mark(finding.severity, signs), f" {finding.when} ")
    text.append(f"{finding.severity} {finding.code} {finding.kind}", SEVERITY[finding.severity])
    where = finding.place if finding.names else "whole run"
    if where not in finding.message:  # some messages name the layer already
        text.append(f" {where}", "bold")
    return text.append(f": {finding.message}")
