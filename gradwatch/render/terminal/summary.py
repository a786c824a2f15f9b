"""The end of a run on one screen: the verdict, the facts, the layers, what to change, and where to look next."""

# T = recorded steps, M = layers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.common import format as units
from gradwatch.render.common.headline import headline
from gradwatch.render.common.layers import (
    Layer,
    layers,
    norms_over_run,
    standouts,
    update_ratios,
    worst_finding,
    zero_fracs,
)
from gradwatch.render.common.run_stats import worst_severity
from gradwatch.render.common.sparkline import Glyphs, glyphs, sparkline
from gradwatch.render.common.style import SEVERITY, mark
from gradwatch.render.terminal.diagnosis import blocks, print_run_events

Floats = NDArray[np.floating[Any]]

MOST_ROWS = 16
"""Layers up to which each has a row."""
WIDE = 110
"""Columns from which long names, long trends and steps fit."""
TREND, TREND_WIDE = 10, 40
TOP_ROWS = 12
"""Rows of a larger model: the layers of most interest; those with findings come first."""


def print_summary(console: Console, history: History, diagnoses: Sequence[Diagnosis], *, run_dir: Path | None) -> None:
    """Print the end of a run. A healthy one takes three lines.

    Args:
        console: Where to print.
        history: The run.
        diagnoses: What explains its findings, the most telling first.
        run_dir: Where it was written, or None.
    """
    signs = glyphs(console)
    lines = headline(history, signs)
    is_whole = bool(run_dir) and not history.findings
    if run_dir and is_whole:
        lines[-1].append_text(_charts(run_dir))
    for line in lines:
        console.print(line, soft_wrap=is_whole and line is lines[-1])
    print_run_events(console, history, run=run_dir)
    if not history.findings:
        return
    if history.info.layers and worst_severity(history) is not None:
        console.print()
        console.print(_table(history, signs, console.width))
    for block in blocks(history, diagnoses, signs=signs, brief=True, width=console.width):
        console.print()
        console.print(block)
    if run_dir:
        console.print()
        closer = Text.assemble(("  look closer  ", "dim"), (f"gradwatch diagnose {run_dir}", "bold"))
        console.print(closer, soft_wrap=True)
        console.print(Text("  see charts ", "dim").append_text(_charts(run_dir)), soft_wrap=True)
        if (report := run_dir / "report.html").is_file():
            console.print(Text.assemble(("  read it all  ", "dim"), (str(report), "bold")), soft_wrap=True)


def _charts(run_dir: Path) -> Text:
    return Text("  ").append(f"tensorboard --logdir {run_dir.parent}", "bold")


@final
@dataclass(frozen=True, slots=True)
class _Columns:
    """What the table shows of each layer."""

    norms_TM: Floats
    ratios_M: Floats
    zeros_M: Floats


def _table(history: History, signs: Glyphs, width: int) -> RenderableType:
    known = layers(history.info.layers)
    shown, rest = _choose(history, known)
    norms_TM = norms_over_run(history, known)[1]
    zeros_M = zero_fracs(history.param.newest("grad.zero_frac")[None], known, history.info.layers)[0]
    columns = _Columns(norms_TM, update_ratios(history, known), zeros_M)
    wide = width >= WIDE
    table = _header(wide=wide, notes=bool(history.findings))
    for m in shown:
        finding = worst_finding(known[m], history.findings)
        name = units.shorten(known[m].name, 48 if wide else 20)
        bars = sparkline(norms_TM[:, m], width=TREND_WIDE if wide else TREND, signs=signs, log=True)
        note = _note(finding, wide=wide) if history.findings else ()
        table.add_row(_health(finding, history, signs), name, *_cells(columns, m, bars), *note)
    for row in _activations(history, signs, wide=wide):
        table.add_row(*row)
    return Group(table, Padding(Text(_others(columns, rest), "dim"), (0, 0, 0, 2))) if rest else table


def _header(*, wide: bool, notes: bool) -> Table:
    roomy = wide or not notes
    table = Table(box=None, padding=(0, 2 if roomy else 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", width=1)
    trend, update = ("over the run", "update/weight") if roomy else ("trend", "upd/weight")
    for name in ("layer", "gradient", trend, update, "zeros", *([""] if notes else [])):
        side: JustifyMethod = "right" if name in ("gradient", update, "zeros") else "left"
        table.add_column(name, justify=side, no_wrap=True, overflow="crop")
    return table


def _choose(history: History, known: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """Return which layers get a row, in the order of the model, and which share one."""
    if len(known) <= MOST_ROWS:
        return list(range(len(known))), []
    worst = [worst_finding(layer, history.findings) for layer in known]
    rank = {s.column: i for i, s in enumerate(standouts(history, known))}
    gravity = [-1 if finding is None else finding.severity for finding in worst]
    top = sorted(range(len(known)), key=lambda m: (-gravity[m], rank[m]))[:TOP_ROWS]
    return sorted(top), sorted(set(range(len(known))) - set(top))


def _cells(columns: _Columns, m: int, bars: str) -> tuple[str, str, str, str]:
    norm = float(columns.norms_TM[-1, m])
    gradient = "none" if np.isnan(norm) else "NaN or Inf" if np.isinf(norm) else units.number(norm)
    return gradient, bars, units.number(float(columns.ratios_M[m]), digits=2), units.percent(float(columns.zeros_M[m]))


def _others(columns: _Columns, rest: Sequence[int]) -> str:
    """Return what the layers without a row of their own have, from the least to the greatest."""
    norms, ratios, zeros = (_span(v_M[rest]) for v_M in (columns.norms_TM[-1], columns.ratios_M, columns.zeros_M))
    told = [f"{len(rest)} more layers"]
    if norms:
        told.append(f"gradient {units.number(norms[0], digits=2)} to {units.number(norms[1], digits=2)}")
    if ratios:
        told.append(f"update/weight {units.number(ratios[0], digits=2)} to {units.number(ratios[1], digits=2)}")
    if zeros and zeros[1] > 0:
        told.append(f"zeros up to {units.percent(zeros[1])}")
    return ", ".join(told)


def _span(values_M: Floats) -> tuple[float, float] | None:
    finite_M = values_M[np.isfinite(values_M)]
    return (float(finite_M.min()), float(finite_M.max())) if finite_M.size else None


def _health(finding: Finding | None, history: History, signs: Glyphs) -> Text:
    """Return the sign of a layer's health; in an ill run, layers that were not named have none."""
    return Text("") if finding is None and history.findings else mark(finding.severity if finding else None, signs)


def _note(finding: Finding | None, *, wide: bool) -> tuple[Text]:
    if finding is None:
        return (Text(""),)
    at = f", step {finding.step:,}" if wide else ""
    return (Text(finding.kind + at, SEVERITY[finding.severity]),)


def _activations(history: History, signs: Glyphs, *, wide: bool) -> list[tuple[Text | str, ...]]:
    """Return rows for the activation modules in which something was found."""
    rows: list[tuple[Text | str, ...]] = []
    for name in dict.fromkeys(f.layer for f in history.findings if f.layer in history.act.layers):
        worst = max((f for f in history.findings if f.layer == name), key=lambda f: f.severity)
        short = units.shorten(str(name), 48 if wide else 20)
        rows.append((mark(worst.severity, signs), short, "", "", "", "", *_note(worst, wide=wide)))
    return rows
