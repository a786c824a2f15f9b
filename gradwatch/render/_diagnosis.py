"""Diagnoses as text: findings, the trend with its onset marked, evidence, cause, how to confirm it, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.render import _units as units
from gradwatch.render._facts import verdict
from gradwatch.render._series import series_of
from gradwatch.render._style import SEVERITY, mark
from gradwatch.render._trend import Glyphs, glyphs, sparkline

NAMES_BRIEF, NAMES = 3, 12
"""Places of a kind that are named one by one, in a summary and in a diagnosis."""
CODE = "#0087af"

Row = tuple[str, Text]


def print_diagnosis(console: Console, history: History, diagnoses: Sequence[Diagnosis]) -> None:
    """Print what `gradwatch diagnose` says of a run: the verdict, then every diagnosis with all of its evidence."""
    signs = glyphs(console)
    console.print(headline(history, signs))
    for block in blocks(history, diagnoses, signs=signs, brief=False, width=console.width):
        console.print()
        console.print(block)


def headline(history: History, signs: Glyphs) -> Text:
    """Return the verdict as one line: healthy, or how many findings of which severity, and the name of the run."""
    found = verdict(history)
    text = Text.assemble(mark(found, signs), " ")
    if found is None:
        text.append("healthy", mark(None, signs).style)
    else:
        counts = [(s, sum(f.severity == s for f in history.findings)) for s in reversed(Severity)]
        text.append(", ".join(f"{n:,} {s}" for s, n in counts if n), SEVERITY[found])
        text.append(" finding" if len(history.findings) == 1 else " findings", SEVERITY[found])
    return text.append(f"  {history.info.name}", "bold")


def blocks(
    history: History, diagnoses: Sequence[Diagnosis], *, signs: Glyphs, brief: bool, width: int
) -> Iterator[RenderableType]:
    """Yield a block of lines for each diagnosis, the gravest first, then one for the findings that none explains.

    Args:
        history: Where findings and trends are.
        diagnoses: What to describe, the most telling first.
        signs: What the terminal can show.
        brief: For a summary: few names, the smallest remedy, no source.
        width: Columns of the terminal.
    """
    explained = {f for d in diagnoses for f in d.findings}
    for diagnosis in sorted(diagnoses, key=lambda d: -d.severity):
        title = _title(diagnosis.severity, diagnosis.cause, signs)
        title.append(f"  {units.percent(diagnosis.certainty)} sure", "dim")
        yield Group(title, _grid(_diagnosis(diagnosis, history, signs=signs, brief=brief, width=width)))
    loose = sorted((f for f in history.findings if f not in explained), key=lambda f: -f.severity)
    if loose:
        rows = [*_found(loose, names=NAMES_BRIEF if brief else NAMES), *_shown(loose[0], history, signs, width)]
        yield Group(_title(loose[0].severity, "no known cause", signs), _grid(rows))


def patch_yaml(patch: Mapping[str, Any]) -> str:
    """Return a change of the config as YAML: dotted keys become nested ones."""
    nested: dict[str, Any] = {}
    for key, value in patch.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return yaml.safe_dump(nested, sort_keys=False, width=100).rstrip()


def _diagnosis(diagnosis: Diagnosis, history: History, *, signs: Glyphs, brief: bool, width: int) -> Iterator[Row]:
    yield from _found(diagnosis.findings, names=NAMES_BRIEF if brief else NAMES)
    yield from _shown(diagnosis.findings[0], history, signs, width)
    yield "why", Text(diagnosis.because)
    yield "confirm", Text(diagnosis.confirm)
    for i, remedy in enumerate(diagnosis.remedies[:1] if brief else diagnosis.remedies):
        yield from _remedy("or" if i else "remedy", remedy)
    if diagnosis.source and not brief:
        yield "source", Text(diagnosis.source, "dim")


def _title(severity: Severity, cause: str, signs: Glyphs) -> Text:
    text = Text.assemble(mark(severity, signs), (f" {severity}  ", SEVERITY[severity]))
    return text.append(cause, "bold")


def _found(findings: Sequence[Finding], *, names: int) -> Iterator[Row]:
    """Yield, for each kind, where it was found and the sentence of the first of it."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for i, mine in enumerate(by_kind.values()):
        text = Text(f"{mine[0].code} {mine[0].kind}", SEVERITY[max(f.severity for f in mine)])
        text.append_text(_places(mine, names))
        yield "" if i else "found", text
        yield "", Text(mine[0].message)


def _places(findings: Sequence[Finding], names: int) -> Text:
    """Return the layers and steps of findings; the step once where it is the same for all."""
    steps = {f.step for f in findings}
    shown = [f.layer or "the whole run" for f in findings[:names]]
    if len(steps) > 1:
        shown = [f"{name} (step {f.step:,})" for name, f in zip(shown, findings, strict=False)]
    more = f" and {len(findings) - names:,} more" if len(findings) > names else ""
    at = f" at step {findings[0].step:,}" if len(steps) == 1 else ""
    return Text.assemble(" in ", (", ".join(shown), "bold"), more, at)


def _shown(finding: Finding, history: History, signs: Glyphs, width: int) -> Iterator[Row]:
    """Yield the series that a finding is about, its step marked, and the evidence."""
    series = series_of(finding, history)
    if series is not None:
        bars = sparkline(series.values_T, width=max(12, min(64, width - 58)), signs=signs, log=series.is_log)
        scale = "log scale" if series.is_log else "linear"
        yield "trend", Text.assemble(bars, (f"  {series.statistic}, {series.ends()}, {scale}", "dim"))
        at = int(np.searchsorted(series.steps_T, finding.step)) * len(bars) // len(series.steps_T)
        yield (
            "",
            Text(" " * min(at, len(bars) - 1) + f"{signs.onset} step {finding.step:,}", SEVERITY[finding.severity]),
        )
    if finding.evidence:
        told = f" {signs.dot} ".join(f"{q.name} {units.quantity(q)}" for q in finding.evidence)
        yield "evidence", Text(told)


def _remedy(label: str, remedy: Remedy) -> Iterator[Row]:
    yield label, Text(remedy.text, "bold")
    if remedy.patch:
        yield "", Text(patch_yaml(remedy.patch), CODE)


def _grid(rows: Iterator[Row] | Sequence[Row]) -> Table:
    """Return labelled paragraphs, the text of each indented behind its label."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=10, justify="right")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid
