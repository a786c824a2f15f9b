"""Write the first lines about a run: its problems or its health, loss and validation, throughput and overhead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from gradwatch.history.disk.ranks import ranks_text
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.problems import RunProblem, problems
from gradwatch.render.common.run_events import early_ending
from gradwatch.render.common.run_stats import RunStats, counted, health, run_stats, too_short_for, watching
from gradwatch.render.common.series import nan_as_inf
from gradwatch.render.common.sparkline import Glyphs, sparkline
from gradwatch.render.common.style import OK, SEVERITY, mark

TREND = 16  # columns of the loss trend
GAP = "  "
"""Separator of two facts on a line, and the indentation of the lines after the first."""


def headline(history: History, diagnoses: Sequence[Diagnosis], signs: Glyphs, *, width: int) -> list[Text]:
    """Return the problems or the health of a run, then how it ended, and its numbers.

    A run without a step gets only the first line. A line breaks between two facts, never within one.

    Args:
        history: The run.
        diagnoses: Diagnoses of its findings.
        signs: Glyphs that the terminal can show.
        width: Columns of the terminal.
    """
    found = [problem for problem in problems(history, diagnoses) if problem.severity > Severity.INFO]
    ended = [Text(f"{GAP}{sentence}", "bold")] if (sentence := early_ending(history)) else []
    name = Text(history.info.name, "bold")
    if history.step < 0:
        return [Text(GAP).join((Text(health(history), "bold"), name)), *ended]
    run = run_stats(history)
    if found:
        facts = [name, _length(history, run), *_ranks(history), *_learning(history, run, signs), *_cost(run)]
        return [*_problems(history, found, signs, width), *ended, *packed(facts, width=width)]
    verdict = Text.assemble(mark(None, signs), " ", (health(history), OK))
    first = packed([verdict, name, _length(history, run), *_ranks(history)], width=width, indent="")
    rest = [line for facts in (_learning(history, run, signs), _cost(run)) for line in packed(facts, width=width)]
    short = too_short_for(history)
    waits = [Text(f"{GAP}too short for: {', '.join(short)}")] if short else []
    return [*first, *ended, *waits, *rest]


def title(problem: RunProblem, signs: Glyphs, *, width: int) -> list[Text]:
    """Return the severity and the cause of a problem, and how certain the cause is, on one line or two."""
    text = Text.assemble(mark(problem.severity, signs), (f" {problem.severity}: ", SEVERITY[problem.severity]))
    return packed([text.append(problem.cause, "bold"), *_aside(problem)], width=width, indent="", gap=" ")


def packed(facts: Sequence[Text], *, width: int, indent: str = GAP, hanging: str = GAP, gap: str = GAP) -> list[Text]:
    """Return facts side by side, in as few lines as fit a width.

    Args:
        facts: Facts, which are never broken.
        width: Columns of a line.
        indent: Indentation of the first line.
        hanging: Indentation of the other lines.
        gap: Separator of two facts on a line.
    """
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + len(gap) + fact.cell_len <= width:
            lines[-1].append(gap).append_text(fact)
        else:
            lines.append(Text(hanging if lines else indent).append_text(fact))
    return lines


def _problems(history: History, found: Sequence[RunProblem], signs: Glyphs, width: int) -> list[Text]:
    first, style = found[0], SEVERITY[found[0].severity]
    text = Text.assemble(mark(first.severity, signs), (f" {units.plural(len(found), 'problem')} ", style))
    if len(found) == 1:
        text.append(f"({first.severity}): ", style).append(first.cause, "bold")
    else:
        critical = sum(problem.severity is Severity.CRITICAL for problem in found)
        warnings = units.plural(len(found) - critical, "warning")
        counts = [f"{critical:,} critical"] * (critical > 0) + [warnings] * (critical < len(found))
        text.append(f"({', '.join(counts)})", style)
    facts = [text, *(_aside(first) if len(found) == 1 else [])]
    notes = sum(f.severity is Severity.INFO for f in history.findings if not any(f in p.findings for p in found))
    facts += [Text(f"and {counted(notes, Severity.INFO)}")] if notes else []
    return packed(facts, width=width, indent="", gap=" ")


def _aside(problem: RunProblem) -> list[Text]:
    """Return how certain the cause of a problem is, and its number of symptoms if it has several."""
    symptoms = [units.plural(len(problem.symptoms), "symptom")] if len(problem.symptoms) > 1 else []
    words = ", ".join([problem.sureness] * bool(problem.sureness) + symptoms)
    return [Text(f"({words})", "dim")] if words else []


def _length(history: History, run: RunStats) -> Text:
    total = history.info.total_steps
    text = Text(units.plural(run.steps, "step"))
    text.append(f" of {total:,}" if total and total != run.steps else "")
    return text.append(f" in {units.duration(run.seconds)}" if np.isfinite(run.seconds) else "")


def _ranks(history: History) -> list[Text]:
    return [Text(text)] if (text := ranks_text(history)) else []


def _learning(history: History, run: RunStats, signs: Glyphs) -> list[Text]:
    loss_T = history["loss"]
    text = Text(f"loss {units.value(float(loss_T[0]))} to {units.value(run.loss)} ")
    facts = [text.append(sparkline(nan_as_inf(loss_T), width=TREND, signs=signs))]
    # a run without validation has nan here
    if np.isfinite(run.val_loss):
        facts.append(Text(f"validation loss {units.number(run.val_loss)}"))
    if np.isfinite(run.val_accuracy):
        facts.append(Text(f"accuracy {units.percent(run.val_accuracy)}"))
    return facts


def _cost(run: RunStats) -> list[Text]:
    costs = [f"{run.samples_per_s:,.0f} samples/s"] if np.isfinite(run.samples_per_s) else []
    if np.isfinite(run.watch_frac):
        costs.append(f"monitoring took {watching(run)}")
    return [Text(cost) for cost in costs]
