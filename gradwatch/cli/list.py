"""`gradwatch list`: list the names that a config can use, and the recorded statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from gradwatch.cli.output.console import output, write

if TYPE_CHECKING:
    from gradwatch.config.names.signatures import Parameter


Listing = Literal[
    "models", "data", "transforms", "optimizers", "schedules", "losses", "detectors", "sinks", "statistics"
]


MAX_SHOWN = 8
"""Maximum number of keyword arguments of one name in a table on a terminal."""

STATISTICS = "Statistics that every run records, with unit, meaning and when they are measured."


def command(
    what: Annotated[
        Listing | None,
        typer.Argument(
            metavar="WHAT",
            help="`models`, `data`, `transforms`, `optimizers`, `schedules`, `losses`, `detectors`, `sinks` or "
            "`statistics`.",
            show_default=False,
            show_choices=False,
        ),
    ] = None,
) -> None:
    """List the names that a config can use, with their keyword arguments and defaults, or the recorded statistics.

    Prints a table on a terminal; otherwise one line per name, with columns separated by tabs. Without WHAT, the
    possible listings are printed.
    """
    if what is None:
        print_rows(("command", "contents"), _listings())
    elif what == "statistics":
        print_rows(("statistic", "unit", "meaning", "measured"), _statistics())
    else:
        print_rows(("name", "keyword arguments", "meaning"), _entries(what))


def _listings() -> Iterator[tuple[str, ...]]:
    from gradwatch.config.names import registry

    places = {v.plural: f"Names for `{v.used_in}` in a config." for v in registry.ALL} | {"statistics": STATISTICS}
    for name in get_args(Listing):
        yield f"gradwatch list {name}", places[name]


def _entries(what: Listing) -> Iterator[tuple[str, ...]]:
    from gradwatch.config.names import registry

    vocabulary = next(v for v in registry.ALL if v.plural == what)
    for entry in vocabulary.entries():
        signature = entry.read()
        described = f"not usable here: {signature.unusable}" if signature.unusable else signature.summary
        name = " ".join((entry.name, *entry.aliases))
        yield name, _shown(signature.parameters), described


def _statistics() -> Iterator[tuple[str, ...]]:
    from gradwatch import catalogue

    for statistic in (*catalogue.PARAM, *catalogue.ACT, *catalogue.RUN):
        yield statistic.name, statistic.unit, statistic.meaning, statistic.cost.text


def _shown(parameters: Sequence[Parameter]) -> str:
    words = [*map(keyword, parameters)]
    if output().is_terminal and len(words) > MAX_SHOWN:
        words[MAX_SHOWN:] = [f"and {len(words) - MAX_SHOWN} more"]
    return " ".join(words)


def keyword(parameter: Parameter) -> str:
    """Return `name=default`, or the name alone if it is required."""
    return parameter.name if parameter.required else f"{parameter.name}={parameter.shown_default()}"


def print_rows(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    """Print rows as a table on a terminal, otherwise as lines with tabs between the columns."""
    console = output()
    if not console.is_terminal:  # for grep and cut: no wrapping, no frame
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
