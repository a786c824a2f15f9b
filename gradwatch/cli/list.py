"""`gradwatch list`: show what a config can name, and what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gradwatch.cli.output.console import output, write

if TYPE_CHECKING:
    from gradwatch.config.names.signatures import Parameter


Listing = Literal[
    "models", "data", "transforms", "optimizers", "schedules", "losses", "detectors", "sinks", "statistics"
]


def command(what: Annotated[Listing, typer.Argument(help="What to list.", show_default=False)]) -> None:
    """List what a config can name, with keyword arguments and defaults, or what is measured.

    A table on a terminal; elsewhere a line each, its columns separated by tabs.
    """
    if what == "statistics":
        _print(("statistic", "unit", "meaning", "measured"), _statistics())
    else:
        _print(("name", "keyword arguments", "what it is"), _entries(what))


def _entries(what: Listing) -> Iterator[tuple[str, ...]]:
    from gradwatch.config.names import registry

    vocabulary = next(v for v in registry.ALL if v.plural == what)
    for entry in vocabulary.entries():
        signature = entry.read()
        described = f"not usable here: {signature.unusable}" if signature.unusable else signature.summary
        name = " ".join((entry.name, *entry.aliases))
        yield name, " ".join(map(keyword, signature.parameters)), described


def _statistics() -> Iterator[tuple[str, ...]]:
    from gradwatch import catalogue

    for statistic in (*catalogue.PARAM, *catalogue.ACT, *catalogue.RUN):
        yield statistic.name, statistic.unit, statistic.meaning, statistic.cost


def keyword(parameter: Parameter) -> str:
    """Return `name=default`, or the name alone where it must be given."""
    return parameter.name if parameter.required else f"{parameter.name}={parameter.shown_default()}"


def _print(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    console = output()
    if not console.is_terminal:
        write("".join("\t".join(row).rstrip("\t") + "\n" for row in rows))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
