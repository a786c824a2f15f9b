"""Print replayed steps and their comparison with the recording."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.cli.output.bad_operation import Row, grid
from gradwatch.records import Severity
from gradwatch.render.common.sparkline import glyphs
from gradwatch.render.common.style import OK, SEVERITY, sentence

if TYPE_CHECKING:
    from gradwatch.history.compare import ValueDifference
    from gradwatch.replay.rerun import Rerun

MAX_DIFFERENCES = 6
"""Maximum number of differences shown, the earliest first."""
MAX_STEPS = 12
"""Maximum number of steps shown one by one."""


def print_rerun(console: Console, rerun: Rerun) -> None:
    """Print whether the steps are bit-identical, and the differences."""
    signs = glyphs(console)
    which = f"step {rerun.step:,}" if rerun.step == rerun.until else f"steps {rerun.step:,} to {rerun.until:,}"
    if rerun.is_same:
        same = "bit-identical" if rerun.world_size == 1 else "equal to rounding"
        line = Text.assemble((f"{signs.ok} {which} of {rerun.run.name}: {same}", OK))
    else:
        sign = f"{signs.marks[Severity.WARNING]} {which} of {rerun.run.name}: differs from the recording"
        line = Text.assemble((sign, SEVERITY[Severity.WARNING]))
    console.print(line)
    console.print()
    for finding in rerun.findings:
        console.print(sentence(finding, signs))
    console.print(grid(_rows(rerun)))
    console.print()
    console.print(_table(rerun))


def _rows(rerun: Rerun) -> Iterator[Row]:
    # weights before step N need the steps up to N - 1
    last = max(rerun.until, *[weights.step - 1 for weights in rerun.weights], rerun.start_step)
    origin = {"incident": "the saved snapshot", "checkpoint": "a checkpoint"}.get(rerun.source)
    yield "replayed", f"steps {rerun.start_step:,} to {last:,}, from {origin or 'the start of the run'}"
    if rerun.world_size > 1:
        ranks = f"{rerun.world_size} ranks in one process, which rounds sums over the ranks differently"
        yield "ranks", f"{ranks}: relative differences up to {rerun.tolerance:.0e} are ignored"
    yield "compared", f"{rerun.compared:,} recorded numbers of these steps: losses, norms, statistics of every layer"
    for weights in rerun.weights:
        was_and_is = f"were {weights.recorded}, are {weights.again}"
        near = "" if weights.distance is None else f"relative distance {weights.distance:.1e}"
        same = (near or f"identical ({weights.again})") if weights.is_same else f"{was_and_is}{near and f', {near}'}"
        yield "weights", f"before step {weights.step:,}: {same}"
    if not rerun.weights:
        yield "weights", "no later weights were saved; the gradients of every layer depend on all of their bits"
    if rerun.is_data_changed:
        yield "data", "a batch has changed: the data are different, or are read differently"
    for name, (then, now) in rerun.machine.items():
        yield "machine", f"{name} was {then}, is {now}"
    # a changed batch has its own line above; its hash means nothing to a reader
    shown = [difference for difference in rerun.differences if difference.statistic != "batch_hash"]
    for i, difference in enumerate(shown[:MAX_DIFFERENCES]):
        yield "" if i else "differs", _difference(difference)
    if len(shown) > MAX_DIFFERENCES:
        yield "", f"and {len(shown) - MAX_DIFFERENCES:,} more"


def _difference(difference: ValueDifference) -> str:
    where = f" of {difference.layer}" if difference.layer else ""
    gap = f", relative difference {difference.relative:.1e}" if math.isfinite(difference.relative) else ""
    was, now = f"{difference.recorded:.9g}", f"{difference.again:.9g}"
    return f"step {difference.step:,}: {difference.statistic}{where} was {was}, is {now}{gap}"


def _table(rerun: Rerun) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("  step", "loss", "gradient", "update", "recorded numbers"):
        table.add_column(title, justify="left" if title in ("update", "recorded numbers") else "right")
    for shown in rerun.steps[:MAX_STEPS]:
        same = "identical" if rerun.world_size == 1 else "equal"
        compared = f"{shown.compared:,} {same if shown.is_same else 'compared, some differ'}"
        table.add_row(
            f"  {shown.step:,}",
            f"{shown.loss:.6g}",
            "not computed" if math.isnan(shown.norm) and shown.is_skipped else f"{shown.norm:.6g}",
            "skipped" if shown.is_skipped else "applied",
            compared if shown.compared else "none recorded",
        )
    if len(rerun.steps) > MAX_STEPS:
        table.add_row("  ...", "", "", "", f"{len(rerun.steps) - MAX_STEPS:,} more steps")
    return table
