"""Recognize the validations of a script, and keep their mean loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

LOSS_FUNCTIONS = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
)
"""Functions of `torch.nn.functional` whose results are recognized. The loss modules of torch call them."""


@final
class Validation:
    """The mean loss of what a model evaluates without gradients, between two updates.

    Only the function that the model is trained with counts. If there are several, or if it does not average, a sum of
    theirs or of its values may be what is trained, so nothing is recognized.

    Attributes:
        is_running: Whether the model has made a pass without gradients since the last update.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._trained: set[tuple[str, str]] = set()
        """Loss functions that got outputs with a graph, and their reductions."""
        self._sum: Tensor | float = 0.0
        self._num_terms = 0

    def on_loss(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Add the loss of a batch if it is evaluated; otherwise note the function.

        Args:
            function: A function of `LOSS_FUNCTIONS`, as torch defines it.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        is_trained = isinstance(result, Tensor) and result.requires_grad
        is_evaluated = self.is_running and isinstance(result, Tensor) and not torch.is_grad_enabled()
        if not is_trained and not is_evaluated:
            return
        name = function.__name__
        passed = inspect.signature(function).bind(*args, **kwargs).arguments
        reduction = passed.get("reduction", "mean")
        if is_trained:
            self._trained.add((name, reduction))
        elif self._trained == {(name, "mean")} and result.numel() == 1:
            num_terms = _count_terms(name, passed["input"], passed["target"])
            with torch.no_grad():
                self._sum = self._sum + result.detach() * (num_terms if reduction == "mean" else 1)
            self._num_terms += num_terms

    def end(self) -> Tensor | float | None:
        """Return the mean loss since the last update, or None without a validation, and begin again."""
        mean = self._sum / self._num_terms if self._num_terms else None
        self.is_running, self._sum, self._num_terms = False, 0.0, 0
        return mean


def _count_terms(name: str, outputs: Tensor, targets: Tensor) -> int:
    """Return the number of terms that a loss averages or adds."""
    if name == "cross_entropy" and targets.shape == outputs.shape:  # a distribution over the classes
        return outputs.numel() // outputs.shape[min(1, outputs.ndim - 1)]
    if name in ("cross_entropy", "nll_loss"):
        return targets.numel()
    return int(torch.broadcast_shapes(outputs.shape, targets.shape).numel())
