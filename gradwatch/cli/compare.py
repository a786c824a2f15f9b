"""`gradwatch compare`: put two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradwatch.cli.options import FINDINGS, FailOn, FormatOption, exit_code
from gradwatch.cli.output.console import output, write

if TYPE_CHECKING:
    from gradwatch.history.compare import Comparison


Agreement = Literal["bits", "rounding", "nothing"]
"""How far two runs must agree."""


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Run directory.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Run directory to compare with it.", show_default=False)],
    form: FormatOption = "text",
    fail_on: Annotated[
        FailOn,
        typer.Option("--fail-on", help="Exit with 1 where B has a finding, at least this severe, that A has not."),
    ] = "warning",
    require: Annotated[
        Agreement,
        typer.Option("--require", help="Exit with 1 if the histories differ in a bit, or beyond rounding."),
    ] = "nothing",
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Relative difference that is rounding; by default what the number format allows."),
    ] = None,
) -> None:
    """Put two runs side by side: where they part, in what settings and layers they differ, and what was found in each.

    Exits with 0, or 1 where B has a finding that A has not or the runs are not as much the same as is required, or 2
    where a run is missing.
    """
    from gradwatch.history.compare import compare
    from gradwatch.history.disk.writer import read
    from gradwatch.render.terminal import comparison

    runs = read(first), read(second)
    found = compare(*runs, tolerance=tolerance)
    changed = comparison.settings(*runs, (_config(first), _config(second)))
    if form == "json":
        write(comparison.dumps(found, runs, changed) + "\n")
    else:
        comparison.print_comparison(output(), found, runs, changed)
    known = {(f.kind, f.layer) for f in runs[0].findings}
    news = (f for f in runs[1].findings if (f.kind, f.layer) not in known)
    raise typer.Exit(exit_code(news, fail_on) or (FINDINGS if _is_apart(found, require) else 0))


def _is_apart(found: Comparison, require: Agreement) -> bool:
    """Return whether two histories agree less than is required; without a step in common they do not agree."""
    if require == "nothing":
        return False
    return not found.steps or (found.bits if require == "bits" else found.rounding) is not None


def _config(run: Path) -> dict[str, Any]:
    from gradwatch.config.yaml_document import read

    return dict(read(run / "config.yaml").data) if (run / "config.yaml").is_file() else {}
