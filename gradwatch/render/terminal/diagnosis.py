"""Print a run in full: layers, findings, trends with the onset marked, evidence, causes, confirmations and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Quantity, Remedy, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import TESTED, patch_command, patch_yaml
from gradwatch.render.common.headline import headline, packed, title
from gradwatch.render.common.problems import grouped, problems
from gradwatch.render.common.run_events import run_events
from gradwatch.render.common.series import series_of
from gradwatch.render.common.sparkline import Glyphs, glyphs
from gradwatch.render.common.style import CODE, OK, SEVERITY
from gradwatch.render.terminal.display import exported_html, html_console
from gradwatch.render.terminal.layer_table import layer_table
from gradwatch.render.terminal.paragraphs import LABEL, Row, command, print_lines, print_rows

MAX_NAMES = 12
"""Maximum number of layers that are listed per kind."""
HTML_WIDTH = 120
"""Columns of a diagnosis in a notebook, which scrolls horizontally."""


def print_diagnosis(
    console: Console, history: History, diagnoses: Sequence[Diagnosis], *, run: Path | None = None
) -> None:
    """Print the output of `gradwatch diagnose --full`: the layers, then each diagnosis with all of its evidence.

    Args:
        console: Console to print to.
        history: The run.
        diagnoses: Diagnoses of its findings.
        run: Run directory, or None.
    """
    signs = glyphs(console)
    print_lines(console, headline(history, diagnoses, signs, width=console.width))
    print_rows(console, _events(history, run))
    if history.info.layers and history.step >= 0:
        console.print()
        console.print(layer_table(history, signs, width=console.width))
    for problem in problems(history, diagnoses):
        console.print()
        print_lines(console, title(problem, signs, width=console.width))
        print_rows(console, _found(problem.findings, history, signs=signs, width=console.width))
        if problem.diagnosis:
            print_rows(console, _cause(problem.diagnosis))
    if rows := [*_try(diagnoses, run)]:
        console.print()
        print_rows(console, rows)


def diagnosis_html(history: History, diagnoses: Sequence[Diagnosis]) -> str:
    """Return a run in full as HTML for a notebook, escaped."""
    console = html_console(HTML_WIDTH)
    print_diagnosis(console, history, diagnoses)
    return exported_html(console)


def remedy_text(remedy: Remedy) -> Text:
    """Return the sentence of a remedy, and whether a test has confirmed it."""
    text = Text(remedy.text, "bold")
    if remedy.cures is not None:
        text.append(f"  {TESTED[remedy.cures]}", OK if remedy.cures else SEVERITY[Severity.WARNING])
    return text


def patch_rows(remedy: Remedy) -> Iterator[Row]:
    """Yield the settings or the code of a remedy, unless its sentence has the code already."""
    change = patch_yaml(remedy.patch) if remedy.patch else remedy.code
    if change and change not in remedy.text:
        yield "", Text(change, CODE)


def evidence_rows(evidence: Sequence[Quantity], signs: Glyphs, *, width: int) -> Iterator[Row]:
    """Yield numbers of evidence with their names, side by side. A line breaks between two numbers."""
    facts = [Text(f"{q.name} {units.quantity(q)}") for q in evidence]
    lines = packed(facts, width=width - LABEL - 1, indent="", hanging="", gap=f" {signs.dot} ")
    if lines:
        yield "evidence", Text("\n").join(lines)


def _events(history: History, run: Path | None) -> Iterator[Row]:
    before = ""  # successive events of a kind share one label
    for event in run_events(history, run=run):
        label, before = "" if event.label == before else event.label, event.label
        yield label, Text(event.text)
        if event.command:
            yield "", command(event.command)


def _try(diagnoses: Sequence[Diagnosis], run: Path | None) -> Iterator[Row]:
    """Yield the command that trains with the first remedy of the most severe diagnosis, if a config can express it."""
    # a remedy that was tested and does not help is left out
    tried = [r for d in diagnoses[:1] for r in d.remedies if r.cures is not False]
    if run and tried and tried[0].patch:
        yield "try it", Text("Train with the fix:")
        yield "", command(patch_command(run, tried[0].patch))


def _cause(diagnosis: Diagnosis) -> Iterator[Row]:
    yield "why", Text(diagnosis.because)
    yield "confirm", Text(diagnosis.confirm)
    if diagnosis.confirm_code:
        yield "", command(diagnosis.confirm_code)
    # remedies are alternatives, the most effective first
    for i, remedy in enumerate(diagnosis.remedies):
        yield "or" if i else "fix", remedy_text(remedy)
        yield from patch_rows(remedy)
    if diagnosis.source:
        yield "source", Text(diagnosis.source, "dim")


def _found(findings: Sequence[Finding], history: History, *, signs: Glyphs, width: int) -> Iterator[Row]:
    """Yield, for each kind, its layers, and the message, trend and evidence of its first finding.

    The kinds are sorted by severity. Kinds of equal severity stay in the order of `findings`.
    """
    worst_first = sorted(grouped(findings), key=lambda mine: -max(f.severity for f in mine))
    for i, mine in enumerate(worst_first):
        yield "also" if i else "found", _places(mine)
        yield "", Text(mine[0].message)
        yield from _trend(mine[0], history, signs, width)
        yield from evidence_rows(mine[0].evidence, signs, width=width)


def _places(findings: Sequence[Finding]) -> Text:
    """Return a kind with its layers and steps, a line per severity, most severe first."""
    text = Text()
    for severity in reversed(Severity):
        mine = [f for f in findings if f.severity == severity]
        if not mine:
            continue
        # a line per severity; an empty Text is false
        text.append("\n" if text else "").append(f"{mine[0].code} {mine[0].kind}", SEVERITY[severity])
        places = [place for f in mine for place in f.names or ("the whole run",)]
        text.append(f" {severity} in ").append(", ".join(places[:MAX_NAMES]), "bold")
        text.append(f" and {len(places) - MAX_NAMES:,} more" if len(places) > MAX_NAMES else "")
        whens = list(dict.fromkeys(f.when for f in mine))
        first, last = min(f.since for f in mine), max(f.since for f in mine)
        at = " at" if mine[0].since == mine[0].step else ""
        text.append(f"{at} {whens[0]}" if len(whens) == 1 else f" at steps {first:,} to {last:,}")
    return text


def _trend(finding: Finding, history: History, signs: Glyphs, width: int) -> Iterator[Row]:
    """Yield the series of a finding, and a line below it with a sign at its onset."""
    series = series_of(finding, history)
    if series is None:
        return
    # 5 columns for the gaps around label and caption
    room = max(12, min(64, width - LABEL - 5 - len(series.caption)))
    bars, onset = series.draw(finding.since, width=room, signs=signs)
    yield "trend", Text.assemble(bars, (f"  {series.caption}", "dim"))
    yield "", Text.assemble(" " * onset, (signs.onset, SEVERITY[finding.severity]), f" step {finding.since:,}")
