"""`gradwatch compare`: compare two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradwatch.cli.options import FINDINGS, THRESHOLDS, FailOn, FormatOption, exit_code
from gradwatch.cli.output.console import output, write
from gradwatch.paths import RUN_CONFIG

if TYPE_CHECKING:
    from gradwatch.history.compare import Comparison


Agreement = Literal["bits", "rounding", "nothing"]
"""How closely two runs must agree."""


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Run directory, the baseline.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Run directory to compare with A.", show_default=False)],
    form: FormatOption = "text",
    fail_on: Annotated[
        FailOn,
        typer.Option(
            "--fail-on",
            metavar="SEVERITY",
            help="Exit with 1 if B has a finding that A does not have, at least this severe: `info`, `warning`, "
            "`critical` or `never`.",
            rich_help_panel=THRESHOLDS,
        ),
    ] = "warning",
    require: Annotated[
        Agreement,
        typer.Option(
            "--require",
            metavar="AGREEMENT",
            help="Exit with 1 unless the recorded numbers are bit-identical (`bits`) or agree up to rounding "
            "(`rounding`); `nothing` accepts any difference.",
            rich_help_panel=THRESHOLDS,
        ),
    ] = "nothing",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="FRACTION",
            help="Largest relative difference that counts as rounding; by default the precision of the number format.",
            show_default=False,
            rich_help_panel=THRESHOLDS,
        ),
    ] = None,
) -> None:
    """Compare two runs: the first step at which they differ, their settings, gradients, results and findings.

    Exit codes: 0 no new finding in B, 1 B has a finding that A does not have or the runs differ more than --require
    allows, 2 a run is missing.
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
    # by kind and layer, not by step: the same finding at another step is not new
    known = {(f.kind, f.layer) for f in runs[0].findings}
    new = (f for f in runs[1].findings if (f.kind, f.layer) not in known)
    raise typer.Exit(exit_code(new, fail_on) or (FINDINGS if _is_apart(found, require) else 0))


def _is_apart(found: Comparison, require: Agreement) -> bool:
    """Return whether two histories agree less than required; without a common step, they do not agree."""
    if require == "nothing":
        return False
    return not found.steps or (found.bits if require == "bits" else found.rounding) is not None


def _config(run: Path) -> dict[str, Any]:
    from gradwatch.config.names.spelling import american_keys
    from gradwatch.config.yaml_document import read

    # an older run may have `normalisation` where a newer one has `normalization`
    return american_keys(read(run / RUN_CONFIG).data) if (run / RUN_CONFIG).is_file() else {}
