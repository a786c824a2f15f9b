"""Draw the table of the layers: gradient, trend, update and findings."""

# T = recorded steps, M = layers

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common import format as units
from gradwatch.render.common.layers import (
    Layer,
    layers,
    median_distances,
    norms_now,
    norms_over_run,
    update_ratios,
    worst_finding,
    zero_fracs,
)
from gradwatch.render.common.sparkline import Glyphs, sparkline
from gradwatch.render.common.style import SEVERITY, mark

MAX_ROWS = 16
"""Maximum number of layers of a model that gets a row for every layer."""
WIDE = 110
"""Minimum columns for long names, long trends and steps."""
TREND, TREND_WIDE = 10, 40
TOP_ROWS = 12
"""Number of rows for a larger model: layers with findings first, then outliers."""


def layer_table(history: History, signs: Glyphs, *, width: int) -> RenderableType:
    """Return the layers of a run with gradient, trend, update, zeros and worst finding."""
    known = layers(history.info.layers)
    shown = _choose(history, known)
    norms_TM = norms_over_run(history, known)[1]
    ratios_M = update_ratios(history, known)
    # `[None]` and `[0]`: `zero_fracs` takes an axis of steps
    zeros_M = zero_fracs(history.param.newest("grad.zero_frac")[None], known, history.info.layers)[0]
    wide = width >= WIDE
    table = _header(wide=wide)
    for m in shown:
        finding, norm = worst_finding(known[m], history.findings), float(norms_TM[-1, m])
        table.add_row(
            _health(finding, history, signs),
            units.shorten(known[m].name, 48 if wide else 20),
            "none" if np.isnan(norm) else "NaN or Inf" if np.isinf(norm) else units.number(norm),
            sparkline(norms_TM[:, m], width=TREND_WIDE if wide else TREND, signs=signs, log=True),
            units.number(float(ratios_M[m]), digits=2),
            units.percent(float(zeros_M[m])),
            _note(finding, wide=wide),
        )
    for row in _activations(history, signs, wide=wide):
        table.add_row(*row)
    rest = len(known) - len(shown)
    return Group(table, Padding(Text(f"{rest:,} more layers", "dim"), (0, 0, 0, 2))) if rest else table


def _header(*, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", width=1)  # the sign of the health
    trend, update = ("over the run", "update/weight") if wide else ("trend", "upd/weight")
    for name in ("layer", "gradient", trend, update, "zeros", ""):
        side: JustifyMethod = "right" if name in ("gradient", update, "zeros") else "left"
        table.add_column(name, justify=side, no_wrap=True, overflow="crop")
    return table


def _choose(history: History, known: Sequence[Layer]) -> list[int]:
    """Return the indexes of the layers that get a row, in the order of the model.

    In a large model, these are the layers with the most severe findings, then the outliers.
    """
    if len(known) <= MAX_ROWS:
        return list(range(len(known)))
    worst = [worst_finding(layer, history.findings) for layer in known]
    gravity = [-1 if finding is None else finding.severity for finding in worst]
    distances = median_distances(norms_now(history, known), known)
    return sorted(sorted(range(len(known)), key=lambda m: (-gravity[m], -distances[m]))[:TOP_ROWS])


def _health(finding: Finding | None, history: History, signs: Glyphs) -> Text:
    # in a run with findings, a layer without one is not marked as healthy
    return Text("") if finding is None and history.findings else mark(finding.severity if finding else None, signs)


def _note(finding: Finding | None, *, wide: bool) -> Text:
    if finding is None:
        return Text("")
    at = f", step {finding.since:,}" if wide else ""
    return Text(finding.kind + at, SEVERITY[finding.severity])


def _activations(history: History, signs: Glyphs, *, wide: bool) -> list[tuple[Text | str, ...]]:
    """Return a row for each activation module with a finding."""
    rows: list[tuple[Text | str, ...]] = []
    # dict.fromkeys: one row per module, in the order of the findings
    for name in dict.fromkeys(name for f in history.findings for name in f.names if name in history.act.layers):
        worst = max((f for f in history.findings if name in f.names), key=lambda f: f.severity)
        short = units.shorten(str(name), 48 if wide else 20)
        rows.append((mark(worst.severity, signs), short, "", "", "", "", _note(worst, wide=wide)))
    return rows
