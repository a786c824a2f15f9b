"""Compute the mean loss of a micro-batch, and the weight of each micro-batch in its optimizer step."""

# N = samples, C = classes, T = positions

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float

CLASSIFYING = (nn.CrossEntropyLoss, nn.NLLLoss)


@final
@dataclass(slots=True, kw_only=True)
class Objective:
    """A mean loss that knows how many targets it counts, so that accumulated micro-batches get exact weights.

    Args:
        function: Called with outputs and targets; returns their mean loss, a scalar.
        look: Called with each loss, before its backward pass; the loss has its autograd graph if gradients are on.
    """

    function: Callable[[Any, Tensor], Tensor]
    look: Callable[[Tensor], None] = lambda loss: None

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch.

        Args:
            outputs: Output of the model: (N, C), or (N, T, C) if there is a label per position.
            targets: Labels (N,) or (N, T), or values of the shape of the outputs.

        Returns:
            Scalar tensor on the device of the outputs.

        Raises:
            GradwatchError: The loss is not a scalar tensor, has no gradient, or does not fit outputs and targets.
        """
        loss: Any = self._raw(outputs, targets)
        if not isinstance(loss, Tensor):
            raise GradwatchError(f"loss: returned a {type(loss).__name__}, expected a tensor of one number")
        if loss.ndim:
            raise GradwatchError(
                f"loss: returned a tensor of shape {tuple(loss.shape)}, expected a scalar; "
                "use reduction: mean, or return loss.mean()"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise GradwatchError(
                "loss: it does not depend on any parameter, so there is no gradient to take; look for detach(), "
                "item(), no_grad() or a new tensor between the model's parameters and the loss"
            )
        self.look(loss)
        return loss

    def _raw(self, outputs: Any, targets: Tensor) -> Any:
        of_torch = type(self.function).__module__.startswith("torch.")
        if not (of_torch or isinstance(self.function, CLASSIFYING)):
            return self.function(outputs, targets)  # a user's own loss may take any outputs and targets
        if not isinstance(outputs, Tensor):
            raise GradwatchError(
                f"model: returned a {type(outputs).__name__}{_length(outputs)}, expected one tensor for "
                f"{type(self.function).__name__}; return the logits alone, or give a loss that takes this output "
                "(loss.target: package.module:name)"
            )
        # torch expects classes in dimension 1, but sequence models return them last
        if isinstance(self.function, CLASSIFYING) and outputs.ndim == 3 and targets.ndim == 2:
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        elif not isinstance(self.function, CLASSIFYING):
            targets = self._aligned(outputs, targets)
        try:
            return self.function(outputs, targets)
        except (RuntimeError, ValueError, IndexError) as error:
            if not of_torch or isinstance(error, torch.OutOfMemoryError):
                raise  # a bug in the user's own loss needs its traceback; out of memory has its own message
            raise GradwatchError(self._misfit(outputs, targets, error)) from error

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over its targets, not a mean."""
        return getattr(self.function, "reduction", "mean") == "sum"

    def shares(self, window: Sequence[tuple[Any, Tensor]]) -> list[float]:
        """Return the weight of each micro-batch in the loss of an optimizer step; weights of a mean add up to 1."""
        if len(window) == 1 or self.is_sum:
            return [1.0] * len(window)
        # by counted targets, not by batches: then accumulation gives the loss of one large batch
        counts = [self.count(targets) for _, targets in window]
        total = sum(counts)
        return [count / total if total else 0.0 for count in counts]

    def count(self, targets: Tensor) -> float:
        """Return the divisor of a mean loss: the number of targets not ignored, or the sum of their class weights."""
        if not isinstance(self.function, CLASSIFYING) or targets.is_floating_point():
            return float(len(targets))  # values and class probabilities have no ignored targets
        counted = targets[targets != self.function.ignore_index]
        if self.function.weight is None:
            return float(counted.numel())
        return to_float(self.function.weight.to(targets.device)[counted].sum())

    def _misfit(self, outputs: Tensor, targets: Tensor, error: Exception) -> str:
        """Return why a torch loss rejects these outputs and targets, most often because labels are out of range."""
        if isinstance(self.function, CLASSIFYING) and outputs.ndim > 1 and not targets.is_floating_point():
            classes = outputs.shape[1]
            counted = targets[targets != self.function.ignore_index]
            low, high = (int(to_float(v)) for v in (counted.min(), counted.max())) if counted.numel() else (0, 0)
            if low < 0 or high >= classes:
                return (
                    f"loss: the labels of a batch run from {low} to {high}, but the model has {classes} outputs, "
                    f"expected labels from 0 to {classes - 1}; give the model as many outputs as there are classes, "
                    "or fix the labels"
                )
        return (
            f"loss: {type(self.function).__name__} cannot take outputs of shape {tuple(outputs.shape)} and targets of "
            f"shape {tuple(targets.shape)} and type {targets.dtype}: {str(error).splitlines()[0]}"
        )

    def _aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the targets in the shape of the outputs and as floats, or raise an error instead of broadcasting."""
        if outputs.shape != targets.shape:
            if outputs.numel() != targets.numel():
                raise GradwatchError(
                    f"loss: {type(self.function).__name__} got outputs of shape {tuple(outputs.shape)} and targets of "
                    f"shape {tuple(targets.shape)}, expected equal shapes; broadcasting would compare every output "
                    "with every target"
                )
            targets = targets.reshape(outputs.shape)  # (N,) for outputs (N, 1): the usual case of one value per sample
        return targets if targets.is_floating_point() else targets.to(torch.float32)


def predictions_right(outputs: Any, targets: Tensor) -> tuple[int, int] | None:
    """Return the number of correct predictions and of labels, or None if the targets are not labels."""
    if not isinstance(outputs, Tensor) or targets.is_floating_point() or outputs.ndim != targets.ndim + 1:
        return None
    right = (outputs.argmax(-1) == targets).sum()
    return int(to_float(right)), targets.numel()


def _length(outputs: object) -> str:
    return f" of {len(outputs)}" if isinstance(outputs, (tuple, list, dict)) else ""
