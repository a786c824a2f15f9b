"""Check the gradient of a training step: `gradwatch.check`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.gradcheck.batches import batch_law, smaller
from gradwatch.gradcheck.broadcasts import crossed_samples
from gradwatch.gradcheck.compare import LeafOutcome
from gradwatch.gradcheck.explain.explainer import Explainer
from gradwatch.gradcheck.explain.second import SecondDerivatives, second_derivatives
from gradwatch.gradcheck.forward_mode import forward_derivative
from gradwatch.gradcheck.judge import Examined, Judge
from gradwatch.gradcheck.options import CheckOptions
from gradwatch.gradcheck.result import Coverage, Fault, GradientCheck, TensorVerdict, Verdict
from gradwatch.gradcheck.stepping.step import CheckedStep

DEFAULT = CheckOptions()
SMALLER_BATCH_FRAC = 0.5
"""Fraction of the time limit within which a check that moves all tensors together also checks half of the batch."""
MAX_FORWARD = 8
"""Maximum number of wrong leaves to differentiate by forward mode as well."""


def check(
    step: Callable[..., Any],
    *batch: Any,
    model: nn.Module | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    allow: Collection[str] = (),
    layer: str | None = None,
    within: float = DEFAULT.within,
    second: bool = False,
) -> GradientCheck:
    """Check whether the gradient of a training step is right, as the step really runs.

    The step runs in float64 many times from the same random state: dropout keeps its mask, and buffers are restored.
    The gradient of each parameter, and of each tensor of the batch that requires one, is compared with differences of
    the loss along a random direction. A wrong one is named by its kind, and located in the custom autograd Function,
    hook or statement that makes it. Weights, buffers, gradients and random generators are restored afterwards.

    Args:
        step: Function of the batch that returns the loss. Its backward pass is run afterwards, unless the step ran it:
            then the gradients that the step leaves in `p.grad` are judged. A module works too; its outputs are
            projected to one number.
        batch: Parts of the batch, at least 2 samples: some mistakes are invisible in a batch of 1.
        model: Model that the step uses. If None, the modules that the step holds are used.
        gradients: Gradients computed by hand, by name of the parameter or input; judged instead of autograd's.
        allow: Names of custom Functions whose backward differs from the derivative on purpose. A Function with the
            attribute `deliberate = True` need not be named.
        layer: Prefix of the names of the parameters to check, or None for all.
        within: Time limit in seconds. If there is no time to move each tensor alone, they are moved together, and
            separately if they differ.
        second: Whether the second derivative of each custom Function is checked too, with the inputs and gradients of
            the step. A step that differentiates a gradient is checked as it is, without it.

    Returns:
        The verdict on each tensor, the mistakes, and what was covered.

    Raises:
        GradwatchError: Nothing requires a gradient, or the loss has no graph, or a name is unknown.
    """
    if isinstance(step, nn.Module) and model is None:
        model = step
    if not callable(step):
        raise GradwatchError(f"check: step is a {type(step).__name__}, expected a function of the batch or a module")
    return run_check(
        step,
        batch,
        model=model,
        functions=(step,),
        gradients=gradients,
        options=CheckOptions(layer=layer, allow=allow, within=within, second=second),
    )


def run_check(
    call: Callable[..., Any],
    batch: tuple[Any, ...],
    *,
    model: nn.Module | None,
    functions: tuple[Any, ...],
    gradients: Mapping[str, Tensor] | None = None,
    options: CheckOptions = DEFAULT,
) -> GradientCheck:
    """Check a step whose user functions are known apart from the call; see `check`."""
    begin = time.monotonic()
    last: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        checked = CheckedStep(call, batch, model=model, functions=functions, dtype=dtype)
        try:
            names = _chosen(checked, options.layer, gradients)
            judge = Judge(
                checked,
                within=options.within,
                allow=options.allow,
                given=gradients,
                names=names,
                progress=options.progress,
            )
            return _judged(judge, begin, second=options.second)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            last = error  # an operation without float64: float32 with its noise
        finally:
            checked.restore()
    assert last is not None, "the loop ends only after an error"
    raise last


def _chosen(step: CheckedStep, layer: str | None, gradients: Mapping[str, Tensor] | None) -> list[str]:
    """Return the names of the leaves to check."""
    names = list(step.leaves)
    for name, grad in (gradients or {}).items():
        if name not in step.leaves:
            raise GradwatchError(f"check: gradients: no tensor '{name}'{did_you_mean(name, names)}")
        if grad.shape != step.leaves[name].shape:
            shapes = f"{tuple(grad.shape)}, expected {tuple(step.leaves[name].shape)}"
            raise GradwatchError(f"check: gradients: '{name}' has shape {shapes}")
    if gradients:
        return list(gradients)
    if layer is None:
        return names
    chosen = [n for n in names if n == layer or n.startswith(f"{layer}.")]
    if not chosen:
        layers = dict.fromkeys(".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 2))
        raise GradwatchError(f"check: no parameter in layer '{layer}'{did_you_mean(layer, layers)}")
    return chosen


def _judged(judge: Judge, begin: float, *, second: bool) -> GradientCheck:
    """Return the result of a judge: outcomes, explanations, and a smaller batch."""
    step = judge.step
    found = judge.tensors()
    wrong = [n for n, o in found.outcomes.items() if o.state == "wrong"]
    explained = Explainer(judge, found, wrong).explain() if wrong else None
    faults = list(explained.faults) if explained else []
    purposes = explained.on_purpose if explained else {}
    sizes, law = [], ""
    has_time = not judge.joint or time.monotonic() - judge.begin < SMALLER_BATCH_FRAC * (judge.deadline - judge.begin)
    if not faults and has_time and not judge.is_late:
        part = smaller(step)
        if part is not None:
            sizes, law = part.sizes, batch_law(step, part)
            faults += _of_smaller_batch(judge, part.step, found)
    twice = second_derivatives(judge, judge.calls, ()) if second and not wrong else SecondDerivatives()
    faults += twice.faults
    forward = _forward_mode(judge, found, wrong)
    verdicts = tuple(_verdict(n, o, purposes, faults, forward.get(n)) for n, o in found.outcomes.items())
    notes = [*dict.fromkeys(purposes.values()), *crossed_samples(step)]
    if judge.joint:
        how = f"in {judge.groups} groups" if judge.groups > 1 else "together"
        notes.append(f"the tensors were moved {how}, since there is no time to move each alone")
    allowed = dict.fromkeys(c.function.__name__ for c in judge.calls if judge.is_allowed(c.function))
    notes += [f"{name} differs from the derivative on purpose; everything else was checked with it" for name in allowed]
    if second and not wrong:
        notes += _second_notes(twice)
    coverage = Coverage(
        tensors=len(found.outcomes),
        directions=judge.directions,
        runs=step.runs,
        points=judge.points,
        functions=tuple(dict.fromkeys(c.name for c in judge.calls)),
        kinks=judge.kinks,
        dtype=str(step.dtype).removeprefix("torch."),
        batches=tuple(sizes),
        seconds=time.monotonic() - begin,
        left_out=len(judge.names) - len(found.outcomes),
        batch=law,
    )
    return GradientCheck(tensors=verdicts, faults=tuple(faults), coverage=coverage, notes=tuple(notes))


def _second_notes(twice: SecondDerivatives) -> list[str]:
    """Return the notes on second derivatives that are not wrong."""
    notes = [f"the second derivative of {', '.join(twice.right)} is right"] if twice.right else []
    if twice.absent:
        notes.append(f"{', '.join(twice.absent)} cannot be differentiated twice: torch raises")
    return notes or ([] if twice.faults else ["there is no custom Function whose second derivative could be wrong"])


def _of_smaller_batch(judge: Judge, part: CheckedStep, whole: Examined) -> list[Fault]:
    """Return mistakes that appear only with a smaller batch."""
    step, judge.step = judge.step, part
    try:
        found = judge.examine(judge.names, part.home, joint=judge.joint)
        judge.points += 1
        wrong = [n for n in found.names("wrong") if whole.outcomes[n].state == "right"]
        again = judge.examine(wrong, part.moved(judge.generator, 1e-2)) if wrong else None
        wrong = [n for n in wrong if again and again.outcomes[n].state == "wrong"]
        return Explainer(judge, found, wrong).explain().faults if wrong else []
    except (RuntimeError, ValueError, IndexError):  # a step for one size of batch
        return []
    finally:
        judge.step = step


def _forward_mode(judge: Judge, found: Examined, wrong: list[str]) -> dict[str, float]:
    """Return the derivatives of the wrong leaves by forward mode.

    They show whether autograd or the differences are wrong. Right leaves need none: the first use makes torch import
    its compiler, which takes seconds.
    """
    values: dict[str, float] = {}
    for name in wrong[:MAX_FORWARD]:
        if judge.is_late:
            break
        value = forward_derivative(judge.step, found.point, found.outcomes[name].shifts)
        if value is None:
            break
        values[name] = value
    return values


def _verdict(
    name: str, outcome: LeafOutcome, purposes: Mapping[str, str], faults: list[Fault], forward: float | None
) -> TensorVerdict:
    states: dict[str, Verdict] = {"right": "right", "wrong": "wrong"}
    verdict = states.get(outcome.state, "cannot tell")
    note = {
        "kink": "at a kink of the loss",
        "flat": "the forward is a step function here",
        "noisy": "the differences are too noisy",
    }.get(outcome.state, "")
    is_faulty = any(name in f.tensors for f in faults)
    if name in purposes and not is_faulty:
        verdict, note = "cannot tell", purposes[name]
    elif is_faulty:
        verdict = "wrong"
    return TensorVerdict(
        name=name,
        verdict=verdict,
        analytic=outcome.analytic,
        numeric=outcome.slope.value,
        error=outcome.error,
        noise=outcome.noise,
        visible=outcome.visible(name),
        visible_norm=outcome.visible_norm(name),
        note=note,
        forward_mode=forward,
    )
