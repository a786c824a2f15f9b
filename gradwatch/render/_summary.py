"""The end of a run on one screen: the verdict, the facts, the layers, what to change, and where to look next."""

# T = recorded steps, M = layers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render import _units as units
from gradwatch.render._diagnosis import blocks, headline
from gradwatch.render._facts import Facts, facts
from gradwatch.render._layers import (
    Layer,
    layers,
    norms_over_run,
    standouts,
    update_ratios,
    worst_finding,
    zero_fracs,
)
from gradwatch.render._series import broken
from gradwatch.render._style import SEVERITY, mark
from gradwatch.render._trend import Glyphs, glyphs, sparkline

Floats = NDArray[np.floating[Any]]

MOST_ROWS = 30
"""Layers up to which each has a row."""
TOP_ROWS = 12
"""Rows of a larger model: the layers of most interest; those with findings come first."""


def print_summary(console: Console, history: History, diagnoses: Sequence[Diagnosis], *, run_dir: Path | None) -> None:
    """Print the end of a run. A healthy one takes three lines and a table.

    Args:
        console: Where to print.
        history: The run.
        diagnoses: What explains its findings, the most telling first.
        run_dir: Where it was written, or None.
    """
    signs = glyphs(console)
    console.print(_verdict(history, signs))
    for text in _facts(history, facts(history), signs, run_dir):
        console.print(text)
    if len(history.param):
        console.print()
        console.print(_table(history, signs, console.width))
    for block in blocks(history, diagnoses, signs=signs, brief=True, width=console.width):
        console.print()
        console.print(block)
    if history.findings and run_dir:
        console.print()
        console.print(_next(run_dir))


def _verdict(history: History, signs: Glyphs) -> Text:
    text = headline(history, signs)
    done, total = history.step + 1, history.info.total_steps
    text.append(f"  {units.plural(done, 'step')}" + (f" of {total:,}" if total and total != done else ""))
    return text.append(f" in {units.duration(facts(history).seconds)}") if done else text


def _facts(history: History, run: Facts, signs: Glyphs, run_dir: Path | None) -> list[Text]:
    """Return two lines of facts: how it learned, and what it cost."""
    loss_T = history["loss"]
    learned = [f"loss {units.number(float(loss_T[0]))} to {_finite(run.loss)}"] if len(loss_T) else []
    if np.isfinite(run.val_loss):
        learned.append(f"validation loss {units.number(run.val_loss)}")
    if np.isfinite(run.val_accuracy):
        learned.append(f"accuracy {units.percent(run.val_accuracy)}")
    text = Text(f"  {learned[0]} " if learned else "").append(sparkline(broken(loss_T), width=16, signs=signs))
    lines = [text.append("".join(f"  {fact}" for fact in learned[1:]))]
    cost = [f"{run.samples_per_s:,.0f} samples/s"] if np.isfinite(run.samples_per_s) else []
    if np.isfinite(run.watch_frac):
        cost.append(f"watching took {units.percent(run.watch_frac)} of the time")
    if run_dir and not history.findings:
        cost.append(f"tensorboard --logdir {run_dir.parent}")
    return [*lines, Text("  " + "  ".join(cost))] if cost else lines


def _next(run_dir: Path) -> Text:
    text = Text("  look closer: ", "dim").append(f"gradwatch diagnose {run_dir}", "bold")
    return text.append("  charts: ", "dim").append(f"tensorboard --logdir {run_dir.parent}", "bold")


@final
@dataclass(frozen=True, slots=True)
class _Columns:
    """What the table shows of each layer."""

    steps_T: NDArray[np.int64]
    norms_TM: Floats
    ratios_M: Floats
    zeros_M: Floats


def _table(history: History, signs: Glyphs, width: int) -> Table:
    known = layers(history.info.layers)
    shown, rest = _choose(history, known)
    steps_T, norms_TM = norms_over_run(history, known)
    zeros_M = zero_fracs(history.param.newest("grad.zero_frac")[None], known, history.info.layers)[0]
    columns = _Columns(steps_T, norms_TM, update_ratios(history, known), zeros_M)
    wide = width >= 120
    trend = 40 if wide else 12
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("layer", no_wrap=True)
    table.add_column("gradient", justify="right", no_wrap=True)
    table.add_column("over the run", no_wrap=True, width=trend)
    table.add_column("update/weight", justify="right", no_wrap=True)
    table.add_column("zeros", justify="right", no_wrap=True)
    if history.findings:
        table.add_column("", no_wrap=True)
    for m in shown:
        finding = worst_finding(known[m], history.findings)
        name = units.shorten(known[m].name, 48 if wide else 22)
        bars = sparkline(norms_TM[:, m], width=trend, signs=signs, log=True)
        table.add_row(
            mark(finding and finding.severity, signs), name, *_cells(columns, m, bars), *_note(finding, history)
        )
    for row in _activations(history, signs):
        table.add_row(*row)
    if rest:
        table.add_row("", f"{len(rest)} more layers", *_range(columns, rest), style="dim")
    return table


def _choose(history: History, known: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """Return which layers get a row, in the order of the model, and which share one."""
    if len(known) <= MOST_ROWS:
        return list(range(len(known))), []
    interest = [s.column for s in standouts(history, known)]
    found = [m for m in interest if worst_finding(known[m], history.findings)]
    top = (found + [m for m in interest if m not in found])[:TOP_ROWS]
    return sorted(top), sorted(set(range(len(known))) - set(top))


def _cells(columns: _Columns, m: int, bars: str) -> tuple[str, str, str, str]:
    norm = float(columns.norms_TM[-1, m])
    gradient = "none" if np.isnan(norm) else _finite(norm)
    return gradient, bars, units.number(float(columns.ratios_M[m]), digits=2), units.percent(float(columns.zeros_M[m]))


def _range(columns: _Columns, rest: Sequence[int]) -> tuple[str, str, str, str]:
    """Return the least and greatest of what the grouped layers have."""
    spans = []
    for values_M in (columns.norms_TM[-1, rest], columns.ratios_M[rest], columns.zeros_M[rest]):
        finite_M = values_M[np.isfinite(values_M)]
        spans.append((float(finite_M.min()), float(finite_M.max())) if finite_M.size else (np.nan, np.nan))
    (low, high), (slow, fast), (_, zeros) = spans
    ratios = f"{units.number(slow, digits=2)}..{units.number(fast, digits=2)}"
    return units.number(low, digits=2), f"to {units.number(high, digits=2)}", ratios, f"<= {units.percent(zeros)}"


def _note(finding: Finding | None, history: History) -> tuple[Text, ...]:
    if not history.findings:
        return ()
    if finding is None:
        return (Text(""),)
    return (Text(f"{finding.kind}, step {finding.step:,}", SEVERITY[finding.severity]),)


def _activations(history: History, signs: Glyphs) -> list[tuple[Text | str, ...]]:
    """Return rows for the activation modules in which something was found."""
    rows: list[tuple[Text | str, ...]] = []
    for name in dict.fromkeys(f.layer for f in history.findings if f.layer in history.act.layers):
        mine = [f for f in history.findings if f.layer == name]
        worst = max(mine, key=lambda f: f.severity)
        rows.append((mark(worst.severity, signs), str(name), "", "", "", "", *_note(worst, history)))
    return rows


def _finite(value: float) -> str:
    return units.number(value) if np.isfinite(value) else "NaN or Inf"
