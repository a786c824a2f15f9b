"""Check the target of the command line: a layer with the shapes of its inputs, a config, or a step of a run."""

# B = samples of a batch

from __future__ import annotations

import ast
import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradwatch import plugins
from gradwatch.errors import GradwatchError, raised
from gradwatch.gradcheck.check import run_check
from gradwatch.gradcheck.layer.check_layer import check_layer as properties_of
from gradwatch.gradcheck.layer.result import LayerCheck
from gradwatch.gradcheck.options import CheckOptions, CheckTarget
from gradwatch.gradcheck.precision.measure import FORMATS, Setting, precision, run_precision
from gradwatch.gradcheck.precision.result import Precision
from gradwatch.gradcheck.result import GradientCheck
from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.gradcheck.training_steps import training_step
from gradwatch.train.step import Batch, Stepper, to_device

SAMPLES = (8, 4)
"""Numbers of samples per micro-batch to check; the largest that fits in the time."""
FORWARD_PASSES = 24
"""Forward passes that a check of all tensors together takes, counting a backward pass as two."""
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\d+))?")
_CALL = re.compile(r"(?P<name>[^()]+?)(?:\((?P<arguments>.*)\))?", re.DOTALL)


def check_target(target: CheckTarget, options: CheckOptions) -> GradientCheck:
    """Check a layer or a function of tensors, the first step of a config, or a step of a run.

    Args:
        target: The layer, config, run or script to check.
        options: Options of the check. The time limit does not include the restoring.
    """
    if target.kind == "layer":
        made, given = _layer(target)
        model = made if isinstance(made, nn.Module) else None
        with _misfits_reported(target):
            return run_check(made, given, model=model, functions=(made,), options=options)
    with training_step(target) as (training, window, notes):
        found = _check_training(training.stepper(), window, options)
    return replace(found, notes=(*notes, *found.notes))


def check_layer_properties(target: CheckTarget) -> LayerCheck | None:
    """Check the properties of a layer, such as independent samples; return None for a function."""
    made, given = _layer(target)
    return properties_of(made, *given) if isinstance(made, nn.Module) else None


def measure_target(target: CheckTarget, *, is_whole: bool) -> Precision:
    """Measure the digits of a layer, the first step of a config, or a step of a run, in each format.

    Args:
        target: The step to measure. The outputs of a layer are projected to one number.
        is_whole: Whether to convert the model instead of autocast.
    """
    if target.kind == "layer":
        made, given = _layer(target)
        with _misfits_reported(target):
            return precision(made, *given, whole=is_whole)
    with training_step(target) as (training, window, notes):
        found = _measure_training(training.stepper(), window, is_whole=is_whole)
    return replace(found, notes=(*notes, *found.notes))


@contextlib.contextmanager
def _misfits_reported(target: CheckTarget) -> Iterator[None]:
    """Report an error of a layer as one about the shapes of its inputs."""
    try:
        yield
    except GradwatchError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = " and ".join(target.inputs)
        raise GradwatchError(f"check: {target.text} does not take inputs of {shapes}: {raised(error)}") from error


def _layer(target: CheckTarget) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the layer or function that a target names, and its inputs."""
    torch.manual_seed(0)
    return _made(target.text), tuple(map(_input, target.inputs))


def _measure_training(stepper: Stepper, window: list[Batch], *, is_whole: bool) -> Precision:
    """Measure the forward and backward passes of a training step in each format, whatever its config says."""
    objective, samples = stepper.objective, SAMPLES[0]
    parts = _first(window, samples)
    shares = objective.shares(parts)
    stepper.precision = "fp32"  # the format is chosen around the step

    def passes(*batches: Batch) -> Tensor:
        pairs = [(share, part) for share, part in zip(shares, batches, strict=True) if share]
        return torch.stack([share * stepper.forward(*part)[1].reshape(()) for share, part in pairs]).sum()

    setting = Setting(
        batch=tuple(to_device(part, stepper.device) for part in parts),
        model=stepper.model,
        functions=(objective.function,),
        is_whole=is_whole,
        is_scaled=True,
    )
    found = run_precision(passes, setting, formats=tuple(FORMATS))
    if any(len(targets) > samples for _, targets in window):
        found = replace(found, notes=(f"the first {samples} samples of each micro-batch were run", *found.notes))
    return found


def _check_training(stepper: Stepper, window: list[Batch], options: CheckOptions) -> GradientCheck:
    """Check the forward and backward passes of a training step: its micro-batches, each with its share."""
    objective = stepper.objective
    samples = _affordable(stepper, window, within=options.within)
    smaller = _first(window, samples)
    shares = objective.shares(smaller)

    def passes(*parts: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=stepper.device)
        for share, part in zip(shares, parts, strict=True):
            if not share:
                continue
            _, loss = stepper.forward(*part)
            loss = loss * share if share != 1.0 else loss
            if torch.is_grad_enabled():  # differences of the loss need no backward pass
                loss.backward()
            total = total + loss.detach()
        return total

    found = run_check(
        passes,
        tuple(to_device(batch, stepper.device) for batch in smaller),
        model=stepper.model,
        functions=(objective.function,),
        options=options,
    )
    if any(len(targets) > samples for _, targets in window):
        note = f"the first {samples} samples of each micro-batch were checked"
        found = replace(found, notes=(note, *found.notes))
    return found


def _affordable(stepper: Stepper, window: list[Batch], *, within: float) -> int:
    """Return the number of samples that fits in the time, estimated from a pass with the fewest."""
    fewest = SAMPLES[-1]
    step = CheckedStep(
        lambda inputs, targets: stepper.forward(inputs, targets)[1],
        to_device(_first(window, fewest)[0], stepper.device),
        model=stepper.model,
        functions=(stepper.objective.function,),
    )
    try:
        with torch.no_grad():
            step.loss()  # the first one allocates
            begin = time.monotonic()
            step.loss()
        seconds = (time.monotonic() - begin) / fewest * len(window) * FORWARD_PASSES
    except (RuntimeError, NotImplementedError):  # no float64, or a batch that is too small for the model
        return SAMPLES[0]
    finally:
        step.restore()
    return next((n for n in SAMPLES if n * seconds <= within), fewest)


def _first(window: list[Batch], samples: int) -> list[Batch]:
    """Return the first samples of each micro-batch."""
    return [tree_map_only(Tensor, lambda t: t[:samples], batch) for batch in window]


def _made(target: str) -> Any:
    """Return the layer that a target names, built with its arguments, or the function itself."""
    match = _CALL.fullmatch(target)
    assert match is not None, "the pattern takes any text"
    found: Any = plugins.target(match["name"], key="check")
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if not is_class and match["arguments"] is None:
        return found
    args, keywords = _literals(match["arguments"] or "", target)
    try:
        return found(*args, **keywords)
    except Exception as error:  # the user's code may raise anything
        raise GradwatchError(
            f"check: '{target}' cannot be built: {raised(error)}; give its arguments: '{match['name']}(16, bias=True)'"
        ) from error


def _literals(text: str, target: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call), "the text was made one"
        args = [ast.literal_eval(a) for a in call.args]
        return args, {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (SyntaxError, ValueError) as error:
        raise GradwatchError(
            f"check: '{target}' has arguments that are not literals, such as 16 or bias=True"
        ) from error


def _input(text: str) -> Tensor:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise GradwatchError(
            f"--input: got '{text}', expected a shape such as 8x16, or 8x16:100 for integers below 100"
        )
    shape = [int(n) for n in match[1].split("x")]
    if match[2]:
        return torch.randint(0, int(match[2]), shape)
    return torch.randn(shape).requires_grad_()
