"""Write the head of the report: the verdict in plain words, how the run ended, its numbers and its main events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.problems import RunProblem, problems
from gradwatch.render.common.run_events import early_ending, run_events
from gradwatch.render.common.run_stats import health, memory, run_stats, watching, worst_severity
from gradwatch.render.report.text import badge, definitions, prose

WORDS = {"non-finite": "NaN or Inf", "dead-relu": "dead ReLU", "missing-zero-grad": "missing zero_grad"}
"""Kinds whose names in words differ from their parts."""


def overview(history: History, diagnoses: Sequence[Diagnosis], run: Path | None) -> str:
    """Return the verdict, the ending, the numbers and the main events of a run."""
    if history.step < 0:
        return f'<p class="health">{escape(health(history))}</p>'
    ended = f'<p class="ending">{prose(_capital(sentence))}.</p>' if (sentence := early_ending(history)) else ""
    facts = f'<div class="facts">{definitions(_facts(history))}</div>'
    shown = f'<p class="health">{badge(worst_severity(history), verdict(history, diagnoses))}</p>'
    return f"{shown}{ended}{facts}{_events(history, run)}"


def verdict(history: History, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the worst problem with its cause in plain words and the number of others, or the health of the run."""
    found = [problem for problem in problems(history, diagnoses) if problem.severity > Severity.INFO]
    if not found:
        return health(history)
    more = f", and {units.plural(len(found) - 1, 'other problem')}" if len(found) > 1 else ""
    return f"{_capital(_named(found[0]))}{more}"


def words(kind: str) -> str:
    """Return the name of a kind of finding in words."""
    return WORDS.get(kind, kind.replace("-", " "))


def _named(problem: RunProblem) -> str:
    kind = words(max(problem.findings, key=lambda f: f.severity).kind)
    if problem.diagnosis is None:
        return kind
    # a cause may repeat the symptom, such as `learning rate too high`
    said = problem.cause.replace("-", " ").lower()
    return problem.cause if said.startswith(kind.replace("-", " ").lower()) else f"{kind}: {problem.cause}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _facts(history: History) -> Iterator[tuple[str, str]]:
    run, total, loss_T = run_stats(history), history.info.total_steps, history["loss"]
    if history.ending is not None:
        yield "status", history.ending.word.replace("-", " ")
    yield "steps", f"{run.steps:,}" + (f" of {total:,}" if total and total != run.steps else "")
    yield "time", units.duration(run.seconds)
    yield "loss", f"{units.value(float(loss_T[0]))} to {units.value(run.loss)}"
    yield "validation loss", units.number(run.val_loss)
    yield "accuracy", units.percent(run.val_accuracy)
    yield "throughput", f"{run.samples_per_s:,.0f} samples/s" if math.isfinite(run.samples_per_s) else units.MISSING
    yield "waiting for data", f"{units.percent(run.wait_frac)} of the time" if run.wait_frac >= 0 else units.MISSING
    yield "peak memory", memory(history, run)
    yield "monitoring took", watching(run)


def _events(history: History, run: Path | None) -> str:
    """Return the main events of the run with their commands, or an empty string without events."""
    rows = "".join(
        f"<div><dt>{escape(event.label)}</dt><dd>{prose(event.text)}"
        f"{f' <code>{escape(event.command)}</code>' if event.command else ''}</dd></div>"
        for event in run_events(history, run=run)
    )
    return f'<dl class="events" aria-label="Main events of the run">{rows}</dl>' if rows else ""
