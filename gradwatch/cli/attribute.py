"""`gradwatch attribute`: explain the outputs for samples by maps of their inputs, and judge the maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gradwatch.attribution.package import require_captum
from gradwatch.cli.options import FINDINGS, ReportFormat, SetOption, format_option
from gradwatch.cli.output.console import print_message, write, write_json
from gradwatch.errors import GradwatchError

SAMPLES = "Samples"
"""Title of a panel in the help."""
NUM_WORST = 4
"""Samples with the largest loss that are shown by default."""
MethodOption = Literal["saliency", "smoothgrad", "integrated", "occlusion", "gradcam"]


def command(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="A run directory, to explain its newest checkpoint; or a config, to explain its initial weights.",
            show_default=False,
        ),
    ],
    sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Index of a sample of the validation data.",
            show_default=False,
            rich_help_panel=SAMPLES,
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help=f"The K samples with the largest loss; {NUM_WORST} by default.",
            show_default=False,
            rich_help_panel=SAMPLES,
        ),
    ] = None,
    overrides: SetOption = None,
    method: Annotated[
        MethodOption,
        typer.Option(metavar="METHOD", help="`integrated`, `saliency`, `smoothgrad`, `occlusion` or `gradcam`."),
    ] = "integrated",
    form: Annotated[
        ReportFormat,
        format_option(
            "`text`, `json`, or `html`, which writes `attributions.html` into the run directory and adds the maps to "
            "its `report.html`."
        ),
    ] = "text",
) -> None:
    """Explain the predictions for samples by maps of their inputs, and say whether each map holds or misleads.

    Exit codes: 0 no map misleads, 1 a map misleads, 2 a mistake in the call.
    """
    if sample is not None and worst is not None:
        raise GradwatchError("--sample and --worst: got both, expected one of them")
    if form == "html" and not target.is_dir():
        raise GradwatchError(f"--format: html needs a run directory, and {target} is none; use text or json")
    if target.is_dir() and overrides:
        raise GradwatchError(f"--set: has no meaning for {target}, which is a run")
    if not target.exists():
        raise GradwatchError(f"attribute: there is no file or folder '{target}'; expected a run directory or a config")
    require_captum()
    if not target.is_dir():
        from gradwatch.config.load import load_config

        load_config(target, overrides or [], is_new=True)  # reports mistakes without torch

    from gradwatch.attribution.targets import attribute_samples

    worst = None if sample is not None else worst or NUM_WORST
    found = attribute_samples(target, overrides or [], method=method, sample=sample, worst=worst)
    if form == "json":
        write_json(found.to_json())
    elif form == "html":
        from gradwatch.cli.output.report import write_run_report
        from gradwatch.run import load_run

        page, run = found.write_page(target), load_run(target)
        print_message("note", f"wrote {page} and {write_run_report(None, target, run.history, run.diagnoses)}")
    else:
        write(f"{found}\n")
    raise typer.Exit(FINDINGS if found.is_misleading else 0)
