"""Print a located operation: its place, its values, the cause, and the path to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from gradwatch.replay.locate.bad_operation import Located

LABEL = 10
Row = tuple[str, str | Text]


def print_located(
    console: Console, located: Located | None, *, step: int, since: int | None = None, rank: int | None = None
) -> None:
    """Print the first bad operation of a step.

    Args:
        console: Console to print to.
        located: The operation, or None if there is none.
        step: The step.
        since: Step whose update made the weight bad, if a weight is the cause and the step is known.
        rank: Rank of the operation, if there are several.
    """
    if located is None:
        console.print(f"step {step:,}: every operation is finite, forward and backward")
        return
    of_rank = "" if rank is None else f"rank {rank}, "
    console.print(Text.assemble(f"{of_rank}step {step:,}: {located.verdict} ", (located.title, "bold")))
    console.print(grid(styled_rows(located, since)))


def grid(rows: Iterable[Row]) -> Table:
    """Return labeled paragraphs, each text indented after its label."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", width=LABEL, justify="right")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text if isinstance(text, Text) else Text(text))
    return table


def styled_rows(located: Located, since: int | None, *, brief: bool = False) -> Iterator[Row]:
    """Yield `Located.rows` with the line of code and the cause in bold."""
    for label, text in located.rows(since=since, brief=brief):
        styled = Text(text)
        if label == "cause":
            styled.stylize("bold", 0, len(located.blame))
        elif located.place and text == located.place.text:
            styled.stylize("bold")
        yield label, styled
