"""Recognize a symptom in a single step: non-finite values, a large gradient, or many zeros in the gradient."""

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
"""Kinds of findings that a single step can show."""
FLUSHED_FRAC = 0.05
"""Fraction of the gradient that is zero only because of its format, above which the gradient counts as flushed."""
SPIKE_FACTOR = 10.0
"""Ratio of the gradient norm to the usual norm of the run, above which a gradient counts as large."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The outcome of a forward and a backward pass.

    Args:
        loss: The loss.
        norm: L2 norm of all gradients, unscaled; nan or inf if a gradient is not finite.
        zero_frac: Fraction of the gradient that is exactly zero, over the layers of the symptom.
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
    """Recognizes a finding in the outcome of a step.

    Args:
        kind: Kind of the finding.
        layer: Name of the module or parameter with the finding, or None for all.
        usual_norm: Norm of the gradient in the first steps of the run.
        zeros_in_float32: Fraction of the gradient that is also zero in float32.
    """

    kind: str
    layer: str | None
    usual_norm: float
    zeros_in_float32: float = 0.0

    @classmethod
    def of(cls, finding: Finding, restored: RestoredStep, *, usual_norm: float) -> Symptom:
        """Return the symptom of a finding at a restored step.

        Args:
            finding: Finding of a kind in `KINDS`.
            restored: The training, restored to the step.
            usual_norm: Norm of the gradient in the first steps of the run.
        """
        symptom = cls(kind=finding.kind, layer=finding.layer, usual_norm=usual_norm)
        if finding.kind not in ZERO:
            return symptom
        # zeros that float32 has too, such as after a dead ReLU, are not underflow
        wide = observe(restored, symptom, stepper=restored.stepper(precision="fp32", scaler=None))
        return dataclasses.replace(symptom, zeros_in_float32=wide.zero_frac)

    def is_in(self, outcome: StepOutcome) -> bool:
        """Return whether an outcome shows the symptom."""
        if self.kind in ZERO:
            return outcome.zero_frac > self.zeros_in_float32 + FLUSHED_FRAC
        if self.kind in LARGE:
            return not outcome.norm <= SPIKE_FACTOR * self.usual_norm  # true for nan, too
        return not outcome.finite

    def describe(self, outcome: StepOutcome) -> str:
        """Format the numbers of an outcome that show whether it has the symptom."""
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
        symptom: Symptom with the layers to count zeros in.
        window: Other micro-batches; None for the step's own.
        stepper: Another stepper; None for the stepper of the run.
        under: Context in which to run the passes.
        prepare: Called on the restored state before the passes.
    """
    # a non-finite loss must not end the passes before the gradients are known
    stepper = dataclasses.replace(stepper or restored.stepper(), on_nonfinite="continue")
    restored.restore()
    try:
        if prepare:
            prepare()
        with under or contextlib.nullcontext():
            loss = stepper.backward(window or restored.window).loss
        # the passes leave the gradients scaled; the stepper would unscale them before its update
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
        # the dot keeps a layer `fc1` from matching `fc10`
        if parameter.grad is not None and (layer is None or name == layer or name.startswith(f"{layer}.")):
            zeros += int(to_host((parameter.grad == 0).sum()))
            total += parameter.numel()
    return zeros / total if total else 0.0
