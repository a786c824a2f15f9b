"""Print which samples make the gradient of a step large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gradwatch.replay.samples.ranking import SampleRanking

MAX_SHOWN = 8
CAUSES = {
    "data": "data: other batches do not have it with the same weights",
    "state": "state: the same batch does not have it with the earlier weights",
    "both": "data and state: it takes this batch and these weights together",
    "either": "data and state: this batch alone makes it, and so do these weights alone",
    "none": "none: it is not larger than that of other batches",
}


def print_samples(console: Console, ranking: SampleRanking) -> None:
    """Print the cause of a large gradient, and the samples with the largest parts in it."""
    factor = f"{ranking.norm / ranking.usual:.3g} times that of other batches"
    console.print(f"the gradient of step {ranking.step:,} has norm {ranking.norm:.4g}, {factor}")
    console.print(f"  cause   {CAUSES[ranking.cause]}")
    compared = [("other batches, these weights", ranking.other_data)]
    if ranking.earlier_step is not None:
        compared += [
            (f"this batch, weights of step {ranking.earlier_step:,}", ranking.other_state),
            (f"other batches, weights of step {ranking.earlier_step:,}", ranking.usual),
        ]
    for text, norm in compared:
        console.print(f"  {norm:<10.4g}{text}")
    if ranking.norm_without is not None:
        names = ", ".join(map(str, ranking.blamed))
        console.print(f"  {ranking.norm_without:<10.4g}without sample{'s' if len(ranking.blamed) > 1 else ''} {names}")
    console.print(_table(ranking))


def _table(ranking: SampleRanking) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("sample", "share", "norm without it"):
        table.add_column(name, justify="right")
    for sample in ranking.samples[:MAX_SHOWN]:
        without = "" if sample.norm_without is None else f"{sample.norm_without:.4g}"
        table.add_row(f"{sample.index}", f"{100 * sample.share:.1f} %", without)
    return table
