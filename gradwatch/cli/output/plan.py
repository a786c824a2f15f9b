"""Print the memory plan of a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.planning.size import shown_size
from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.style import OK, SEVERITY

if TYPE_CHECKING:
    from gradwatch.planning.result import ModuleRow, Plan

MAX_ROWS = 20
"""Modules to print; the others are in the JSON."""


def print_plan(console: Console, plan: Plan, *, limit: int, measured: Plan | None) -> None:
    """Print the verdict, the parts, and the modules that save most.

    Args:
        console: Console to print to.
        plan: The plan.
        limit: Bytes that the training may take.
        measured: What the step needed when it ran, or None.
    """
    fits = plan.peak_bytes <= limit
    console.print(
        Text.assemble(
            ("peak", "bold"),
            f"  {shown_size(plan.peak_bytes)} on {plan.device}, in the {plan.phase} pass: "
            if plan.phase != "update"
            else f"  {shown_size(plan.peak_bytes)} on {plan.device}, in the update: ",
            ("fits" if fits else "does not fit", OK if fits else SEVERITY[Severity.CRITICAL]),
            f" in {shown_size(limit)}",
        )
    )
    if measured:
        off = plan.peak_bytes / measured.peak_bytes - 1
        console.print(f"measured  {shown_size(measured.peak_bytes)}; the plan is {100 * off:+.1f} % off")
    console.print(f"{plan.parameters:,} parameters, {units.number(plan.flops)} floating-point operations in a step")
    console.print()
    console.print(_parts(plan))
    console.print()
    console.print(_modules((measured or plan).modules))


def _parts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    table.add_row(*(Text(title, "dim") for title in ("part", "at its largest", "at the peak")))
    for part, nbytes in plan.parts.items():
        table.add_row(part, shown_size(nbytes), shown_size(plan.at_peak[part]))
    return table


def _modules(rows: Sequence[ModuleRow]) -> Table:
    has_times = any(not math.isnan(row.forward_ms) for row in rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    titles = ["module", "type", "output", "parameters", "saved", "FLOPs"]
    titles += ["forward", "backward"] if has_times else []
    for i in range(len(titles)):
        table.add_column(justify="left" if i < 3 else "right", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in titles))
    # the largest, but in the order of the model
    kept = {id(row) for row in sorted(rows, key=lambda row: -row.saved_bytes)[:MAX_ROWS]}
    for row in rows:
        if id(row) in kept:
            times = [f"{units.number(ms)} ms" for ms in (row.forward_ms, row.backward_ms)] if has_times else []
            table.add_row(*_cells(row), *times)
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"{len(rows) - MAX_ROWS} more: --format json", "dim"))
    return table


def _cells(row: ModuleRow) -> list[str]:
    shapes = ", ".join("x".join(str(n) for n in shape) for shape in row.outputs)
    views = f" ({row.saved_views} shared)" if row.saved_views else ""
    return [
        row.name or "(the model)",
        row.type,
        shapes,
        f"{row.parameters:,}",
        shown_size(row.saved_bytes) + views,
        units.number(row.flops),
    ]
