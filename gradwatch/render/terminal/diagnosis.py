"""Print diagnoses as text: findings, trend with the onset marked, evidence, cause, confirmation and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import TESTED, patch_command, patch_yaml
from gradwatch.render.common.headline import headline
from gradwatch.render.common.run_events import run_events
from gradwatch.render.common.series import series_of
from gradwatch.render.common.sparkline import Glyphs, glyphs
from gradwatch.render.common.style import OK, SEVERITY, mark

NAMES_BRIEF, NAMES = 3, 12
"""Maximum number of layers that are listed per kind, in a summary and in a diagnosis."""
LABEL = 10  # columns of a label
CODE = "#0087af"

Row = tuple[str, Text]


def print_diagnosis(
    console: Console, history: History, diagnoses: Sequence[Diagnosis], *, run: Path | None = None
) -> None:
    """Print the output of `gradwatch diagnose`: the verdict, then each diagnosis with all of its evidence.

    Args:
        console: Console to print to.
        history: The run.
        diagnoses: Diagnoses of its findings.
        run: Run directory, or None.
    """
    signs = glyphs(console)
    for line in headline(history, signs):
        console.print(line)
    print_run_events(console, history, run=run)
    for block in blocks(history, diagnoses, signs=signs, brief=False, width=console.width):
        console.print()
        console.print(block)
    print_fix(console, diagnoses, run=run)


def print_fix(console: Console, diagnoses: Sequence[Diagnosis], *, run: Path | None) -> None:
    """Print the command that trains with the first remedy of the most severe diagnosis, if a config can express it."""
    # a remedy that was tested and does not help is left out
    tried = [r for d in diagnoses[:1] for r in d.remedies if r.cures is not False]
    if run and tried and tried[0].patch:
        console.print()
        command = patch_command(run, tried[0].patch)
        # a command must not be broken into lines: people copy it
        console.print(Text.assemble(("  Try the fix:  ", "dim"), (command, "bold")), soft_wrap=True)


def print_run_events(console: Console, history: History, *, run: Path | None) -> None:
    """Print the events of a run, if there are any."""
    before = ""  # successive events of a kind share one label
    for event in run_events(history, run=run):
        label, before = "" if event.label == before else event.label, event.label
        line = Text.assemble((f"{label:>{LABEL}} ", "dim"), event.text, (f" {event.command}".rstrip(), "bold"))
        console.print(line, soft_wrap=True)  # a command must not be broken into lines: people copy it


def blocks(
    history: History, diagnoses: Sequence[Diagnosis], *, signs: Glyphs, brief: bool, width: int
) -> Iterator[RenderableType]:
    """Yield a block of lines for each diagnosis, most severe first, then one for the unexplained findings.

    Args:
        history: The run, with its findings and trends.
        diagnoses: Diagnoses to describe, most severe first.
        signs: Glyphs that the terminal can show.
        brief: Whether to print few names, only the smallest remedy and no source, for a summary.
        width: Columns of the terminal.
    """
    explained = {f for d in diagnoses for f in d.findings}  # findings are frozen, so they can be in a set
    # a stable sort: of equal severity, the earliest stays first
    for diagnosis in sorted(diagnoses, key=lambda d: -d.severity):
        title = _title(diagnosis.severity, diagnosis.cause, signs)
        title.append(f"  {diagnosis.sureness}", "dim")
        found = _found(diagnosis.findings, history, signs=signs, brief=brief, width=width)
        yield Group(title, _grid([*found, *_cause(diagnosis, brief=brief)]))
    loose = sorted((f for f in history.findings if f not in explained), key=lambda f: -f.severity)
    if loose:
        found = _found(loose, history, signs=signs, brief=brief, width=width)
        yield Group(_title(loose[0].severity, "no known cause", signs), _grid([*found]))


def _cause(diagnosis: Diagnosis, *, brief: bool) -> Iterator[Row]:
    yield "why", Text(diagnosis.because)
    yield "confirm", Text(diagnosis.confirm)
    # remedies are alternatives, the most effective first
    for i, remedy in enumerate(diagnosis.remedies[:1] if brief else diagnosis.remedies):
        yield from _remedy("or" if i else "fix", remedy)
    if diagnosis.source and not brief:
        yield "source", Text(diagnosis.source, "dim")


def _title(severity: Severity, cause: str, signs: Glyphs) -> Text:
    text = Text.assemble(mark(severity, signs), (f" {severity}  ", SEVERITY[severity]))
    return text.append(cause, "bold")


def _found(findings: Sequence[Finding], history: History, *, signs: Glyphs, brief: bool, width: int) -> Iterator[Row]:
    """Yield, for each kind, its layers, and the message, trend and evidence of its first finding.

    The kinds are sorted by severity. Kinds of equal severity stay in the order of `findings`.
    """
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    worst_first = sorted(by_kind.values(), key=lambda mine: -max(f.severity for f in mine))
    for i, mine in enumerate(worst_first):
        yield "also" if i else "found", _places(mine, NAMES_BRIEF if brief else NAMES)
        yield "", Text(mine[0].message)
        if i == 0 or not brief:  # a summary shows the trend of the most severe kind only
            yield from _trend(mine[0], history, signs, width)
            yield from _evidence(mine[0], signs)


def _places(findings: Sequence[Finding], names: int) -> Text:
    """Return a kind with its layers and steps, a line per severity, most severe first."""
    text = Text()
    for severity in reversed(Severity):
        mine = [f for f in findings if f.severity == severity]
        if not mine:
            continue
        # a line per severity; an empty Text is false
        text.append("\n" if text else "").append(f"{mine[0].code} {mine[0].kind}", SEVERITY[severity])
        places = [place for f in mine for place in f.names or ("the whole run",)]
        text.append(f" {severity} in ").append(", ".join(places[:names]), "bold")
        text.append(f" and {len(places) - names:,} more" if len(places) > names else "")
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


def _evidence(finding: Finding, signs: Glyphs) -> Iterator[Row]:
    if finding.evidence:
        yield "evidence", Text(f" {signs.dot} ".join(f"{q.name} {units.quantity(q)}" for q in finding.evidence))


def _remedy(label: str, remedy: Remedy) -> Iterator[Row]:
    text = Text(remedy.text, "bold")
    if remedy.cures is not None:
        text.append(f"  {TESTED[remedy.cures]}", OK if remedy.cures else SEVERITY[Severity.WARNING])
    yield label, text
    if remedy.patch or remedy.code:
        yield "", Text(patch_yaml(remedy.patch) if remedy.patch else remedy.code, CODE)


def _grid(rows: Sequence[Row]) -> Table:
    """Return labeled paragraphs, with the text of each indented after its label."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=LABEL, justify="right")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid
