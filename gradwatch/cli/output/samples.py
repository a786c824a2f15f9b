"""Print which samples make the gradient of a step large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gradwatch.replay.samples.ranking import SampleRanking

MAX_SHOWN = 8
CAUSES = {
    "data": "data: with the same weights, other batches have a usual gradient",
    "state": "state: with the earlier weights, the same batch has a usual gradient",
    "both": "data and state: the gradient is large only for this batch and these weights together",
    "either": "data or state: this batch alone makes the gradient large, and so do these weights alone",
    "none": "none: the gradient is no larger than the gradients of other batches",
}
"""Causes of a large gradient in words, by the key of `SampleRanking.cause`."""


def print_samples(console: Console, ranking: SampleRanking) -> None:
    """Print the cause of a large gradient, and the samples with the largest parts in it."""
    factor = f"{ranking.norm / ranking.usual:.3g} times the norm of other batches"
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
