"""Print the summary of a run on one screen: its problems, the fix, a little evidence, and commands that show more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import patch_command
from gradwatch.render.common.headline import GAP, headline, title
from gradwatch.render.common.problems import RunProblem, names_of, problems
from gradwatch.render.common.run_events import run_events
from gradwatch.render.common.run_stats import memory, run_stats
from gradwatch.render.common.sparkline import Glyphs, glyphs
from gradwatch.render.common.style import SEVERITY, mark
from gradwatch.render.terminal.diagnosis import evidence_rows, patch_rows, remedy_text
from gradwatch.render.terminal.paragraphs import LABEL, Row, command, print_lines, print_rows

MAX_NAMES = 3
"""Maximum number of layers that are listed."""
MAX_NUMBERS = 3
"""Maximum number of numbers that are listed as evidence."""
MAX_OTHERS = 2
"""Maximum number of problems after the first, which get a line with their fix."""
MAX_NOTES = 3
"""Maximum number of notes that are listed, in a run without problems."""
MAX_CODE_LINES = 4
"""Maximum number of lines of code of the fix."""


def print_summary(console: Console, history: History, diagnoses: Sequence[Diagnosis], *, run_dir: Path | None) -> None:
    """Print the summary of a run. A healthy run takes 3 lines, and a run with a problem at most 18 as a rule.

    Args:
        console: Console to print to.
        history: The run.
        diagnoses: Diagnoses of its findings, most severe first.
        run_dir: Run directory, or None.
    """
    signs = glyphs(console)
    print_lines(console, headline(history, diagnoses, signs, width=console.width))
    found = problems(history, diagnoses)
    loud = [problem for problem in found if problem.severity > Severity.INFO]
    if loud:
        console.print()
        if len(loud) > 1:  # the headline has the cause of a single problem
            print_lines(console, title(loud[0], signs, width=console.width))
        print_rows(console, _problem(loud[0], signs, run_dir=run_dir, width=console.width))
        for problem in loud[1 : MAX_OTHERS + 1]:
            print_lines(console, title(problem, signs, width=console.width))
            print_rows(console, _fix(problem, run_dir=None))
        if len(loud) > MAX_OTHERS + 1:
            console.print(f"{GAP}and {units.plural(len(loud) - MAX_OTHERS - 1, 'more problem')}", style="dim")
    else:
        print_rows(console, _notes(found, signs))
    print_rows(console, _memory(history))
    print_rows(console, _events(history, run_dir))
    print_rows(console, _commands(run_dir, has_findings=bool(found)))


def _problem(problem: RunProblem, signs: Glyphs, *, run_dir: Path | None, width: int) -> Iterator[Row]:
    """Yield the fix of a problem, its leading finding with evidence, and its other symptoms on one line."""
    yield from _fix(problem, run_dir=run_dir)
    leading = problem.findings[0]
    yield "found", _found(problem.symptoms[0])
    yield from evidence_rows(leading.evidence[:MAX_NUMBERS], signs, width=width)
    if others := problem.symptoms[1:]:
        yield "also", _others(others, signs, width=width - LABEL - 1)


def _fix(problem: RunProblem, *, run_dir: Path | None) -> Iterator[Row]:
    """Yield the best remedy: as a command for a run directory, otherwise as settings or code."""
    remedy = problem.remedy
    if remedy is None:
        code = problem.findings[0].code
        yield "fix", Text.assemble("no remedy is known; for what to check, see ", (f"gradwatch explain {code}", "bold"))
        return
    yield "fix", remedy_text(remedy)
    if remedy.patch and run_dir:
        yield "", command(patch_command(run_dir, remedy.patch))
    else:
        yield from _change(remedy)


def _change(remedy: Remedy) -> Iterator[Row]:
    for _, text in patch_rows(remedy):
        lines = text.split("\n")
        yield "", Text("\n").join(lines[:MAX_CODE_LINES])
        if len(lines) > MAX_CODE_LINES:
            yield "", Text(f"and {units.plural(len(lines) - MAX_CODE_LINES, 'more line')}", "dim")


def _found(findings: Sequence[Finding]) -> Text:
    """Return the leading finding of a kind as a sentence, with the layers of all findings of the kind."""
    leading, names = findings[0], names_of(findings)
    text = Text(f"{leading.when}: ")
    if len(names) > 1 or (names and names[0] not in leading.message):  # some messages name the layer already
        text.append(", ".join(names[:MAX_NAMES]), "bold")
        text.append(f" and {len(names) - MAX_NAMES:,} more: " if len(names) > MAX_NAMES else ": ")
    return text.append(leading.message).append(f" ({leading.code} {leading.kind})", SEVERITY[leading.severity])


def _others(symptoms: Sequence[Sequence[Finding]], signs: Glyphs, *, width: int) -> Text:
    """Return the kinds of further symptoms on one line, the most severe first, with their onsets if there is room."""
    symptoms = sorted(symptoms, key=lambda findings: -max(f.severity for f in findings))
    whole = Text(", ").join(_symptom(findings, signs, is_dated=True) for findings in symptoms)
    if whole.cell_len <= width:
        return whole
    shown = [_symptom(findings, signs, is_dated=False) for findings in symptoms]
    for count in range(len(shown), 0, -1):
        more = [Text(f"and {len(shown) - count} more")] if count < len(shown) else []
        line = Text(", ").join([*shown[:count], *more])
        if line.cell_len <= width:
            return line
    return Text(units.plural(len(shown), "more symptom"))


def _symptom(findings: Sequence[Finding], signs: Glyphs, *, is_dated: bool) -> Text:
    worst = max(f.severity for f in findings)
    text = Text.assemble(mark(worst, signs), f" {findings[0].kind}")
    if not is_dated:
        return text
    places = f" in {len(names):,} layers" if len(names := names_of(findings)) > 1 else ""
    return text.append(f"{places} (step {min(f.since for f in findings):,})")


def _notes(found: Sequence[RunProblem], signs: Glyphs) -> Iterator[Row]:
    """Yield the notes of a run without problems, one per kind."""
    kinds = [findings for problem in found for findings in problem.symptoms]
    for i, findings in enumerate(kinds[:MAX_NOTES]):
        yield "" if i else "note", Text.assemble(mark(findings[0].severity, signs), " ", _found(findings))
    if len(kinds) > MAX_NOTES:
        yield "", Text(f"and {units.plural(len(kinds) - MAX_NOTES, 'more note')}", "dim")


def _memory(history: History) -> Iterator[Row]:
    """Yield the measured and the planned peak of memory, if the step was planned."""
    run = run_stats(history)
    if run.planned_peak_bytes >= 0:
        yield "memory", Text(memory(history, run))


def _events(history: History, run_dir: Path | None) -> Iterator[Row]:
    """Yield the first event of each kind, or for an incident the command that replays it, and how many more follow."""
    before = ""
    for event in run_events(history, run=run_dir, most=1):
        label, before = "" if event.label == before else event.label, event.label
        yield label, command(event.command) if event.command else Text(event.text)


def _commands(run_dir: Path | None, *, has_findings: bool) -> Iterator[Row]:
    if run_dir is None:
        return
    yield "charts", command(f"tensorboard --logdir {shlex.quote(str(run_dir.parent))}")
    if not has_findings:
        return
    # the sink of the report closes before the terminal's
    if (report := run_dir / "report.html").is_file():
        yield "report", command(str(report))
    yield "more", command(f"gradwatch diagnose {shlex.quote(str(run_dir))} --full")
