"""`gradwatch check`: check whether the gradient of a layer, a config or a recorded step is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwatch.cli.options import FINDINGS, FormatOption
from gradwatch.cli.output.console import write
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.gradcheck.result import GradientCheck

WHAT = "What to check"
"""Title of a panel in the help."""


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="`package.module:Layer` or `package.module:Layer(16)`; or a config; or a run directory.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of an input of the layer: `8x16`, or `8x16:100` for integers below 100. Repeatable.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting of the config. Repeatable.", rich_help_panel=WHAT
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Optimizer step of the run, from 0; by default the one after its newest checkpoint.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Check the parameters of this layer only.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FUNCTION",
            help="Custom autograd Function that differs from the derivative on purpose. Repeatable.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    within: Annotated[float, typer.Option(min=1.0, metavar="S", help="Time in seconds.", rich_help_panel=WHAT)] = 30.0,
    form: FormatOption = "text",
) -> None:
    """Check whether gradients are right: against differences of the loss, in float64, in the step as it really runs.

    Of a layer, its properties are checked too, such as samples that do not affect each other.

    Exit codes: 0 right, 1 wrong, 2 a mistake in the call.
    """
    found = _checked(target, inputs or [], overrides or [], step, layer=layer, allow=allow or [], within=within)
    properties = None
    if inputs:  # then the target is a layer
        from gradwatch.gradcheck.targets import check_layer_properties

        try:
            properties = check_layer_properties(target, inputs)
        except GradwatchError as error:  # such as a batch of 1, which the check of the gradient takes
            found = replace(found, notes=(*found.notes, f"the properties of the layer were not checked: {error}"))
    if form == "json":
        import json

        document = found.to_json() | ({"layer": properties.to_json()} if properties else {})
        write(json.dumps(document, indent=1) + "\n")
    else:
        write(f"{found}\n" + (f"{properties}\n" if properties else ""))
    is_wrong = found.is_wrong or (properties is not None and properties.is_wrong)
    raise typer.Exit(FINDINGS if is_wrong else 0)


def _checked(
    target: str,
    inputs: list[str],
    overrides: list[str],
    step: int | None,
    *,
    layer: str | None,
    allow: list[str],
    within: float,
) -> GradientCheck:
    """Check the layer, the config or the run that a target names."""
    path = Path(target).expanduser()
    is_run, is_config = path.is_dir(), path.is_file()
    is_layer = not (is_run or is_config) and ":" in target
    if not (is_run or is_config or is_layer):
        raise GradwatchError(
            f"check: there is no file or folder '{target}'; expected a config, a run directory or package.module:Layer"
        )
    wrong_options = [
        name
        for name, is_given, fits in (
            ("--input", bool(inputs), is_layer),
            ("--set", bool(overrides), is_config),
            ("--step", step is not None, is_run),
        )
        if is_given and not fits
    ]
    if wrong_options:
        kind = "a layer" if is_layer else "a config" if is_config else "a run"
        raise GradwatchError(f"{wrong_options[0]}: has no meaning for {target}, which is {kind}")
    if is_layer and not inputs:  # before torch is loaded
        raise GradwatchError(f"check: {target} is a layer, expected the shape of each input: --input 8x16")
    if is_config:
        from gradwatch.config.load import load_config

        load_config(path, overrides, is_new=True)  # before torch is loaded

    from gradwatch.gradcheck.targets import check_config, check_layer, check_run

    if is_run:
        return check_run(path, step, layer=layer, allow=allow, within=within)
    if is_config:
        return check_config(path, overrides, layer=layer, allow=allow, within=within)
    return check_layer(target, inputs, layer=layer, allow=allow, within=within)
