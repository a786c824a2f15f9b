"""Measure the digits that a step keeps in float32, bfloat16 and float16: `gradwatch.precision`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.formulas import stable_code
from gradwatch.gradcheck.compare import NEGLIGIBLE_FRAC
from gradwatch.gradcheck.precision.ranking import nearest_overflow, ranked
from gradwatch.gradcheck.precision.result import Format, FormatReport, LatentFormula, Precision
from gradwatch.gradcheck.precision.tracer import PrecisionTracer, compared
from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.singularities import find_unstable
from gradwatch.probe.place import NOWHERE, Place
from gradwatch.replay.locate.module_stack import ModuleStack

FORMATS: dict[Format, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""Factors of the loss in fp16, the first that overflows no gradient: a GradScaler begins at 65,536."""
MAX_FORMULAS = 8

Call = Callable[..., Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the step is run.

    Args:
        batch: Parts of the batch.
        model: Model of the step, or None.
        functions: The user's functions.
        is_whole: Whether to convert model and batch instead of autocast.
        is_scaled: Whether fp16 scales the loss.
    """

    batch: tuple[Any, ...]
    model: nn.Module | None
    functions: tuple[Any, ...]
    is_whole: bool
    is_scaled: bool


def precision(
    step: Call,
    *batch: Any,
    model: nn.Module | None = None,
    formats: Collection[str] = tuple(FORMATS),
    whole: bool = False,
    scaler: bool = True,
) -> Precision:
    """Measure how many digits a training step keeps in each format, and name the operations that lose them.

    The step runs once per format. Every operation runs a second time in float64, on float64 copies of its arguments, so
    that its relative error is known, forward and backward. An operation loses the digits that are wrong in its result
    and were right in its arguments. Weights, buffers, gradients and random generators are restored afterwards.

    Args:
        step: Function of the batch that returns the loss. Its backward pass is run afterwards, unless the step ran it.
            A module works too; its outputs are projected to one number.
        batch: Parts of the batch.
        model: Model that the step uses. If None, the modules that the step holds are used.
        formats: Some of fp32, bf16 and fp16. The half formats run under autocast.
        whole: Whether to convert the model and the batch to the half formats instead of autocast.
        scaler: Whether fp16 multiplies the loss as a GradScaler does, if the step runs no backward pass itself.

    Returns:
        For each format the digits of the loss and the gradients, the operations that lose digits, and the distance of
        the largest value from an overflow; and the unstable formulas in the graph of the loss.

    Raises:
        GradwatchError: A format is unknown, or nothing requires a gradient.
    """
    if isinstance(step, nn.Module) and model is None:
        model = step
    if not callable(step):
        raise GradwatchError(
            f"precision: step is a {type(step).__name__}, expected a function of the batch or a module"
        )
    setting = Setting(batch=batch, model=model, functions=(step,), is_whole=whole, is_scaled=scaler)
    return run_precision(step, setting, formats=formats)


def run_precision(call: Call, setting: Setting, *, formats: Collection[str]) -> Precision:
    """Measure a step in some formats; see `precision`.

    Args:
        call: The step.
        setting: How it is run.
        formats: Names of formats.
    """
    begin = time.monotonic()
    for name in formats:
        if name not in FORMATS:
            raise GradwatchError(
                f"precision: no format '{name}'{did_you_mean(name, FORMATS)}; there are fp32, bf16, fp16"
            )
    reports: list[FormatReport] = []
    formulas: tuple[LatentFormula, ...] = ()
    for name in (n for n in FORMATS if n in formats):
        for scale in SCALES if name == "fp16" and setting.is_scaled else (1.0,):
            report, found = _measured(call, setting, name, scale)
            if report.is_finite:
                break
        reports.append(report)
        formulas = formulas or found
    return Precision(formats=tuple(reports), formulas=formulas, seconds=time.monotonic() - begin)


def _measured(
    call: Call, setting: Setting, name: Format, scale: float
) -> tuple[FormatReport, tuple[LatentFormula, ...]]:
    """Run the step once in a format."""
    is_half = name != "fp32"
    dtype = FORMATS[name] if setting.is_whole and is_half else torch.float32
    step = CheckedStep(call, setting.batch, model=setting.model, functions=setting.functions, dtype=dtype)
    try:
        if is_half and not setting.is_whole:
            device = next(iter(step.leaves.values())).device.type
            step.around = lambda: torch.autocast(device, dtype=FORMATS[name])
        modules = ModuleStack(setting.model)
        tracer = PrecisionTracer(modules, within=CheckedStep.scalar.__code__)
        with step.placed(), torch.enable_grad(), modules:
            _register_originals(tracer, step, setting)
            loss, formulas, scale = _passes(step, tracer, scale)
            return _report(tracer, step, name, loss, is_whole=setting.is_whole and is_half, scale=scale), formulas
    finally:
        step.restore()


def _passes(
    step: CheckedStep, tracer: PrecisionTracer, scale: float
) -> tuple[Tensor, tuple[LatentFormula, ...], float]:
    """Run forward and backward under a tracer; return the loss, its unstable formulas, and the scale that was used."""
    with tracer:
        loss = step.scalar(*step.batch)
    formulas = _formulas(tracer, loss)
    if any(leaf.grad is not None for leaf in step.leaves.values()):  # the step ran its own backward pass
        return loss, formulas, 1.0
    if not loss.requires_grad:
        raise GradwatchError("precision: the step returned a loss without a graph and ran no backward pass")
    seed = torch.full_like(loss, scale, dtype=torch.float32).to(loss.dtype)  # infinite if float16 cannot hold it
    with tracer:
        loss.backward(seed)
    return loss, formulas, scale


def _register_originals(tracer: PrecisionTracer, step: CheckedStep, setting: Setting) -> None:
    """Register the values of tensors before their conversion, since its rounding is an error too."""
    pairs = list(step.originals)
    batch = (t for t in tree_leaves(setting.batch) if isinstance(t, Tensor))
    pairs += zip((t for t in tree_leaves(step.batch) if isinstance(t, Tensor)), batch, strict=True)
    with torch.no_grad():
        for tensor, original in pairs:
            if tensor.dtype != original.dtype and tensor.layout == torch.strided and tensor.numel():
                tracer.shadows.know(tensor, original)
                twin = tracer.shadows.twin(tensor)
                if twin is not None and tensor.is_floating_point():
                    twin.error, _, twin.top, _, _ = compared(tensor.detach(), tracer.shadows.of(tensor.detach()))


def _formulas(tracer: PrecisionTracer, loss: Tensor) -> tuple[LatentFormula, ...]:
    """Return the unstable formulas in the graph of a loss, with the lines of their operations."""
    if loss.grad_fn is None:
        return ()
    found: dict[tuple[Place, str], LatentFormula] = {}
    for formula in find_unstable(Graph(loss)):
        operation = tracer.log.of_node(formula.node)
        made = LatentFormula(
            text=formula.text,
            stable=stable_code(formula.formula, formula.argument),
            module=operation.module if operation else "",
            place=operation.place if operation else NOWHERE,
        )
        found.setdefault((made.place, made.text), made)
    return tuple(found.values())[:MAX_FORMULAS]


def _report(
    tracer: PrecisionTracer, step: CheckedStep, name: Format, loss: Tensor, *, is_whole: bool, scale: float
) -> FormatReport:
    """Return the report of a run."""
    shadows = tracer.shadows
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        loss_error = compared(loss.detach(), shadows.of(loss.detach()))[0]
    gradients: dict[str, float] = {}
    norms: dict[str, float] = {}
    flushed = elements = 0
    for leaf_name, leaf in step.leaves.items():
        if leaf.grad is None or leaf.grad.layout != torch.strided:
            continue
        error, norm, _, zeros, count = compared(leaf.grad.detach(), shadows.of(leaf.grad.detach()))
        gradients[leaf_name], norms[leaf_name] = error, norm
        flushed, elements = flushed + zeros, elements + count
    largest = max((n for n in norms.values() if math.isfinite(n)), default=0.0)
    gradients = {n: math.nan if norms[n] <= NEGLIGIBLE_FRAC * largest else e for n, e in gradients.items()}
    return FormatReport(
        format=name,
        is_whole=is_whole,
        digits=-math.log10(torch.finfo(FORMATS[name]).eps / 2),
        loss=loss_error,
        gradients=gradients,
        lost=ranked(tracer.measured),
        reach=nearest_overflow(tracer.measured, FORMATS[name]),
        flushed=flushed / elements if elements else 0.0,
        loss_scale=scale,
        unfollowed=tuple(sorted(tracer.unfollowed)),
    )
