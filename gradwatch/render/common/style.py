"""How findings look in a terminal: a sign and a word for each severity, and a colour that repeats them."""

from __future__ import annotations

from typing import final

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


@final
class Repeats:
    """Lets the first few findings of a kind through, so that thirty sick layers do not fill the screen.

    Args:
        most: Findings of one kind that are shown one by one.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._seen: dict[str, int] = {}

    def admits(self, finding: Finding) -> bool:
        """Count a finding and say whether it is one of the first of its kind."""
        count = self._seen[finding.kind] = self._seen.get(finding.kind, 0) + 1
        return count <= self._most

    def is_last(self, finding: Finding) -> bool:
        """Say whether this was the last of its kind to be shown one by one."""
        return self._seen.get(finding.kind) == self._most
