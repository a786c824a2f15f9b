"""How findings look in a terminal: a sign and a word for each severity, and a colour that repeats them."""

from __future__ import annotations

from rich.text import Text

from gradwatch.records import Finding, Severity
from gradwatch.render.common.sparkline import Glyphs

# from the 256-colour cube, at least 3:1 on black and on white (WCAG 2.1, 1.4.11)
OK = "#008700"
SEVERITY = {Severity.INFO: "#0087af", Severity.WARNING: "#d75f00", Severity.CRITICAL: "bold #d70000"}


def mark(severity: Severity | None, signs: Glyphs) -> Text:
    """Return the one-column sign of a health; None is healthy."""
    return Text(signs.ok, OK) if severity is None else Text(signs.marks[severity], SEVERITY[severity])


def sentence(finding: Finding, signs: Glyphs) -> Text:
    """Return a finding as one line: sign, step, severity, kind, where, and the sentence."""
    text = Text.assemble(mark(finding.severity, signs), f" step {finding.step:,} ")
    text.append(f"{finding.severity} {finding.code} {finding.kind}", SEVERITY[finding.severity])
    where = finding.layer or "whole run"
    if where not in finding.message:
        text.append(f" {where}", "bold")
    return text.append(f": {finding.message}")
