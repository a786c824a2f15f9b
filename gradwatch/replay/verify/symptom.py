"""Recognise a symptom in a single step: values that are not finite, a large gradient, many zeros in it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.records import Finding
from gradwatch.replay.restore.restored_step import RestoredStep
from gradwatch.replay.trials.trial_run import NON_FINITE
from gradwatch.train.step import Batch, Stepper

LARGE = ("gradient-spike", "exploding-gradient")
ZERO = ("fp16-underflow",)
KINDS = (*NON_FINITE, *LARGE, *ZERO)
"""Kinds of findings that a single step shows."""
FLUSHED = 0.05
"""Fraction of the gradient that is zero only for its format, from which on it counts as flushed."""
SPIKE = 10.0
"""Norm, in units of what is usual in the run, from which on a gradient counts as large here."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The outcome of a forward and a backward pass.

    Args:
        loss: The loss.
        norm: L2 norm of all gradients, unscaled; nan or inf where one is not finite.
        zero_frac: Fraction of the gradient that is exactly zero, over the layers in question.
    """

    loss: float
    norm: float
    zero_frac: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """How to see an illness in an outcome.

    Args:
        kind: Kind of the finding.
        layer: Name of the module or parameter that it was found in, or None for all.
        usual_norm: Norm of the gradient that the run had in its first steps.
        zeros_in_float32: Fraction of the gradient that is zero in float32, too.
    """

    kind: str
    layer: str | None
    usual_norm: float
    zeros_in_float32: float = 0.0

    @classmethod
    def of(cls, finding: Finding, restored: RestoredStep, *, usual_norm: float) -> Symptom:
        """Return the symptom of a finding whose kind is one of `KINDS`, at a restored step."""
        symptom = cls(kind=finding.kind, layer=finding.layer, usual_norm=usual_norm)
        if finding.kind not in ZERO:
            return symptom
        wide = observe(restored, symptom, stepper=restored.stepper(precision="fp32", scaler=None))
        return dataclasses.replace(symptom, zeros_in_float32=wide.zero_frac)

    def is_in(self, outcome: StepOutcome) -> bool:
        """Return whether an outcome shows the symptom."""
        if self.kind in ZERO:
            return outcome.zero_frac > self.zeros_in_float32 + FLUSHED
        if self.kind in LARGE:
            return not outcome.norm <= SPIKE * self.usual_norm
        return not outcome.finite

    def told(self, outcome: StepOutcome) -> str:
        """Return the numbers of an outcome in which it shows, or does not."""
        if self.kind in ZERO:
            return f"{100 * outcome.zero_frac:.3g} % of the gradient is zero"
        return f"loss {outcome.loss:.4g}, gradient norm {outcome.norm:.4g}"


def observe(
    restored: RestoredStep,
    symptom: Symptom,
    *,
    window: Sequence[Batch] | None = None,
    stepper: Stepper | None = None,
    under: contextlib.AbstractContextManager[object] | None = None,
    prepare: Callable[[], None] | None = None,
) -> StepOutcome:
    """Run the forward and backward pass of a restored step with changes, undo them, and return the outcome.

    Args:
        restored: The training, restored to the step.
        symptom: Of which layers zeros are counted.
        window: Other batches.
        stepper: Another way to run it.
        under: A context to run it in.
        prepare: Called on the restored state, before it runs.
    """
    stepper = dataclasses.replace(stepper or restored.stepper(), on_nonfinite="continue")
    restored.restore()
    try:
        if prepare:
            prepare()
        with under or contextlib.nullcontext():
            loss, _ = stepper.backward(window or restored.window)
        scale = stepper.scaler.get_scale() if stepper.scaler else 1.0
        return StepOutcome(loss=loss, norm=_norm(restored) / scale, zero_frac=_zeros(restored, symptom.layer))
    finally:
        restored.restore()


def _norm(restored: RestoredStep) -> float:
    grads = [p.grad for p in restored.training.model.parameters() if p.grad is not None]
    return to_float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0


def _zeros(restored: RestoredStep, layer: str | None) -> float:
    """Return the fraction of gradient elements that are zero in the parameters of a layer."""
    zeros = total = 0
    for name, parameter in restored.training.model.named_parameters():
        if parameter.grad is not None and (layer is None or name == layer or name.startswith(f"{layer}.")):
            zeros += int(to_host((parameter.grad == 0).sum()))
            total += parameter.numel()
    return zeros / total if total else 0.0
