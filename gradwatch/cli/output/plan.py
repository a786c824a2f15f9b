"""Print the memory plan of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.style import CODE, OK, SEVERITY

if TYPE_CHECKING:
    from gradwatch.planning.advice import Advised
    from gradwatch.planning.result import ModuleRow, Plan
    from gradwatch.planning.sharing import SharedPlan

MAX_ROWS = 20
"""Modules to print; the others are in the JSON."""

NO_BATCH = "no data.batch_size fits, not even one sample"
NO_CHANGE = "none of these fits, not even all of them together: a smaller model or more memory is needed"


def print_plan(console: Console, plan: Plan, *, limit: int, measured: Plan | None) -> None:
    """Print whether the training fits, the parts, and the modules that save most.

    Args:
        console: Console to print to.
        plan: The plan.
        limit: Bytes that the training may take.
        measured: The measured memory of the step, or None if it did not run.
    """
    fits = plan.peak_bytes <= limit
    phase = "update" if plan.phase == "update" else f"{plan.phase} pass"
    console.print(
        Text.assemble(
            ("peak", "bold"),
            f"  {units.shown_size(plan.peak_bytes)} on {plan.device}, in the {phase}: ",
            ("fits" if fits else "does not fit", OK if fits else SEVERITY[Severity.CRITICAL]),
            f" in {units.shown_size(limit)}",
        )
    )
    if measured:
        off = plan.peak_bytes / measured.peak_bytes - 1
        console.print(f"measured  {units.shown_size(measured.peak_bytes)}; the plan is {100 * off:+.1f} % off")
    console.print(f"{plan.parameters:,} parameters, {units.number(plan.flops)} floating-point operations in a step")
    console.print()
    console.print(_parts(plan))
    console.print()
    console.print(_modules((measured or plan).modules))


def print_advice(console: Console, advised: Advised) -> None:
    """Print the largest batch that fits, and each change with what it saves and costs.

    Args:
        console: Console to print to.
        advised: The advice for the budget.
    """
    from gradwatch.planning.advice import EFFECTS

    console.print()
    console.print(
        f"largest data.batch_size that fits: {advised.largest_batch:,}" if advised.largest_batch else NO_BATCH
    )
    if advised.changes:
        console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    for i in range(5):
        table.add_column(justify="right" if 0 < i < 4 else "left", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in ("change", "peak", "saves", "more work", "")))
    for advice in advised.changes:
        fit = _shown_fit(advice.fits)
        table.add_row(
            advice.text,
            units.shown_size(advice.peak_bytes),
            units.shown_size(advice.saved_bytes),
            f"{round(100 * advice.extra_work):d} %",
            Text.assemble(fit, f", {EFFECTS[advice.effect]}"),
        )
    if advised.changes:
        console.print(table)
    if not advised.fits and not advised.cheapest:
        console.print(f"\n{NO_CHANGE}")


def print_patch(
    console: Console, text: str, changes: Mapping[str, Any] | None, patch: Path | None, *, fits: bool
) -> None:
    """Print the cheapest change that fits, and whether it was written to a file.

    Args:
        console: Console to print to.
        text: The change in words.
        changes: The change as settings, or None if none is needed or none fits.
        patch: The file, or None.
        fits: Whether the training fits as it is.
    """
    if changes:
        console.print(Text(f"\ncheapest change that fits: {text}"))
        console.print(Text(patch_yaml(changes), CODE))
    if patch:
        reason = "it fits as it is" if fits else "no change fits"
        console.print(f"written to {patch}" if changes else f"{patch} is not written: {reason}")


def print_ranks(console: Console, ways: Sequence[SharedPlan], *, ranks: int, limit: int) -> None:
    """Print the peak of one of several ranks for each way to share a training.

    Args:
        console: Console to print to.
        ways: The ways, with their plans.
        ranks: Number of ranks.
        limit: Bytes that one rank may take.
    """
    console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    for i in range(4):
        table.add_column(justify="right" if 0 < i < 3 else "left", overflow="fold")
    table.add_row(*(Text(title, "dim") for title in (f"one of {ranks} ranks", "peak", "saves", "")))
    for way in ways:
        price = Text.assemble(_shown_fit(way.peak_bytes <= limit), f", {way.sharing.price}")
        name = f"{way.sharing.name}: {way.sharing.text}"
        table.add_row(name, units.shown_size(way.peak_bytes), units.shown_size(way.saved_bytes), price)
    console.print(table)


def _shown_fit(fits: bool) -> Text:
    return Text("fits", OK) if fits else Text("does not fit", SEVERITY[Severity.WARNING])


def _parts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    table.add_row(*(Text(title, "dim") for title in ("part", "at its largest", "at the peak")))
    for part, nbytes in plan.parts.items():
        table.add_row(part, units.shown_size(nbytes), units.shown_size(plan.at_peak[part]))
    return table


def _modules(rows: Sequence[ModuleRow]) -> Table:
    has_times = any(not math.isnan(row.forward_ms) for row in rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    titles = ["module", "type", "output", "parameters", "saved", "FLOPs"]
    titles += ["forward", "backward"] if has_times else []
    for title in titles:
        # in a narrow terminal, types may be cut, and shapes if there are times; names and numbers never
        is_cut = title == "type" or (title == "output" and has_times)
        table.add_column(
            justify="left" if title in ("module", "type", "output") else "right",
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=not is_cut,
        )
    table.add_row(*(Text(title, "dim") for title in titles))
    # the largest modules, in the order of the model
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
        units.shown_size(row.saved_bytes) + views,
        units.number(row.flops),
    ]
