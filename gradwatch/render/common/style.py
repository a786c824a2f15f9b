"""Style findings for a terminal: a sign and a word for each severity, and a color that repeats them."""

from __future__ import annotations

from rich.text import Text

from gradwatch.records import Finding, Severity
from gradwatch.render.common.sparkline import Glyphs

# from the 256-color cube, at least 3:1 on black and on white (WCAG 2.1, 1.4.11)
OK = "#008700"
SEVERITY = {Severity.INFO: "#0087af", Severity.WARNING: "#d75f00", Severity.CRITICAL: "bold #d70000"}


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
