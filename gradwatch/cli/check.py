"""`gradwatch check`: check the gradient of a layer, a config or a recorded step, or audit the stages of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gradwatch.cli.command import surplus
from gradwatch.cli.options import FINDINGS, FormatOption, SetOption, step_option
from gradwatch.cli.output.console import write, write_json
from gradwatch.cli.output.progress import progress_line
from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.options import CheckOptions, CheckTarget, TargetKind

if TYPE_CHECKING:
    from gradwatch.gradcheck.audit.result import StepAudit
    from gradwatch.gradcheck.layer.result import LayerCheck
    from gradwatch.gradcheck.precision.result import Precision
    from gradwatch.gradcheck.result import GradientCheck

WHAT = "What to check"
"""Title of a panel in the help."""
WITHIN_S = 30.0
"""Default time budget of a check."""


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="`package.module:Layer` or `package.module:Layer(16)`, a config, or a run directory; with "
            "--step-audit, also a training script.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS...]", help="Arguments of the script.", show_default=False),
    ] = None,
    step_audit: Annotated[
        bool,
        typer.Option(
            "--step-audit",
            help="Instead, compare each stage of the step with its formula: loss, gradient, sum over the "
            "micro-batches, unscaling, clipping, update and schedule.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    precision: Annotated[
        bool,
        typer.Option(
            "--precision",
            help="Instead, measure how many digits the step keeps in fp32, bf16 and fp16, and name what loses them.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="With --precision: convert the whole model to the half formats instead of autocast.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of an input of the layer: `8x16`, or `8x16:100` for integers below 100. Repeatable.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    overrides: SetOption = None,
    step: Annotated[int | None, step_option("the one after the newest checkpoint")] = None,
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
            metavar="NAME",
            help="Accept a custom autograd Function that differs from the derivative on purpose; with --step-audit, a "
            "kind of difference, such as `mean-of-means`. Repeatable.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    second: Annotated[
        bool,
        typer.Option(
            "--second",
            help="Check the second derivatives of custom autograd Functions too.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    within: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help=f"Time budget; {WITHIN_S:g} by default.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    form: FormatOption = "text",
) -> None:
    """Check whether gradients are right: compare them with differences of the loss, in the step as it really runs.

    For a layer, its properties are checked too, such as whether samples affect each other.

    Exit codes: 0 right, 1 wrong, 2 a mistake in the call. With --precision, 1 means that fp32 gives NaN or Inf.
    """
    kind = _kind(target)
    if arguments and kind != "script":
        raise GradwatchError(f"check: {surplus(arguments, takes_settings=True)}")
    # before torch is loaded
    of_kind = f"for {target}, which is a {kind}"
    of_gradient = "with --step-audit or --precision, which run the whole step"
    for name, is_given, fits, where_not in (
        ("--input", bool(inputs), kind == "layer" and not step_audit, of_kind),
        ("--set", bool(overrides), kind == "config", of_kind),
        ("--step", step is not None, kind == "run", of_kind),
        ("--step-audit", step_audit, kind != "layer", of_kind),
        ("--layer", layer is not None, not (step_audit or precision), of_gradient),
        ("--within", within is not None, not (step_audit or precision), of_gradient),
        ("--second", second, not (step_audit or precision), of_gradient),
        ("--allow", bool(allow), not precision, "with --precision, which compares no gradients"),
        ("--whole", whole, precision, "without --precision"),
        ("--precision", precision, not step_audit, "with --step-audit: give one of them"),
    ):
        if is_given and not fits:
            raise GradwatchError(f"{name}: has no meaning {where_not}")
    if kind == "script" and not step_audit:
        raise GradwatchError(
            f"check: {target} is a script; its step is compared with --step-audit, and its gradient with "
            "gradwatch.check(step, *batch, model=model)"
        )
    if kind == "layer" and not inputs:
        raise GradwatchError(f"check: {target} is a layer, expected the shape of each input: --input 8x16")
    if kind == "config":
        from gradwatch.config.load import load_config

        load_config(Path(target).expanduser(), overrides or [], is_new=True)
    named = CheckTarget(
        text=target, kind=kind, inputs=inputs or [], overrides=overrides or [], step=step, arguments=arguments or []
    )
    if step_audit:
        from gradwatch.gradcheck.audit.targets import audit_target

        audit = audit_target(named, allow=allow or [])
        _end(audit, None, form, is_wrong=not audit)
    from gradwatch.gradcheck.targets import check_layer_properties, check_target, measure_target

    if precision:
        digits = measure_target(named, is_whole=whole)
        _end(digits, None, form, is_wrong=not digits["fp32"].is_finite)
    within = WITHIN_S if within is None else within
    with progress_line(hidden=form == "json") as progress:
        options = CheckOptions(layer=layer, allow=allow or [], within=within, second=second, progress=progress)
        found = check_target(named, options)
    properties = None
    if inputs:
        try:
            properties = check_layer_properties(named)
        except GradwatchError as error:  # such as for a batch of 1, which the check of the gradient accepts
            found = replace(found, notes=(*found.notes, f"the properties of the layer were not checked: {error}"))
    _end(found, properties, form, is_wrong=found.is_wrong or (properties is not None and properties.is_wrong))


def _kind(target: str) -> TargetKind:
    """Return the kind of a target; a layer is the only target that is not a path."""
    path = Path(target).expanduser()
    if path.is_dir():
        return "run"
    if path.is_file():
        return "script" if path.suffix == ".py" else "config"
    if ":" in target:
        return "layer"
    raise GradwatchError(
        f"check: there is no file or folder '{target}'; expected a config, a run directory or package.module:Layer"
    )


def _end(
    found: GradientCheck | StepAudit | Precision,
    properties: LayerCheck | None,
    form: Literal["text", "json"],
    *,
    is_wrong: bool,
) -> None:
    """Write the results, and exit with their code."""
    if form == "json":
        document = found.to_json() | ({"layer": properties.to_json()} if properties else {})
        write_json(document)
    else:
        write(f"{found}\n" + (f"{properties}\n" if properties else ""))
    raise typer.Exit(FINDINGS if is_wrong else 0)
