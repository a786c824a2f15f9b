"""Judge whether a loss distinguishes the samples of a batch, from the gradients of the outputs and the targets."""

# N = samples, C = classes

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from gradwatch.events import LABELS_EQUAL, OUTPUTS_AVERAGED, TARGETS_SHARED, Observation
from gradwatch.probe.batches.loss_forms import Floats, labels_of_classes, targets_of_squares

MIN_STEPS = 4
"""Sampled steps in a row that must agree: one batch may hold a single sequence, or a single class."""

MAX_STEPS = 16
"""Sampled steps to read: a loss has one form."""

EQUAL = 1e-4
"""Maximum spread of numbers that are the same, in units of the largest: float32 rounds sums of squares to less."""

MIN_CHANGE = 0.01
"""Minimum difference of numbers that differ, in units of the largest. The gradient of a mean of outputs, such as the
value of a critic, stays the same; that of an error does not."""

MIN_LABELS, MIN_LABEL_STEPS = 256, 8
"""Labels that must be the same, and sampled steps that must have them. Then another class has at most 1.2 % of the
samples (95 %, rule of three), unless they are sorted by class."""

MIN_CLASSES = 3
"""Minimum number of classes. With two, one may be as rare as fraud."""


@final
class SampleContrast:
    """Read the first sampled steps of a run for losses whose gradient or target is the same for all samples.

    Attributes:
        is_over: Whether nothing more is read.
    """

    def __init__(self) -> None:
        self._gradients: list[float] = []  # of steps at which all samples had the same
        self._targets: list[float] = []
        self._labels: list[int] = []
        self._num_labels = self._steps = 0
        self._largest = 0.0  # output or target
        self.is_over = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        return {
            "gradients": list(self._gradients),
            "targets": list(self._targets),
            "labels": list(self._labels),
            "num_labels": self._num_labels,
            "steps": self._steps,
            "largest": self._largest,
            "is_over": self.is_over,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._gradients, self._targets, self._labels = (list(state[key]) for key in ("gradients", "targets", "labels"))
        self._num_labels, self._steps, self.is_over = state["num_labels"], state["steps"], state["is_over"]
        self._largest = state["largest"]

    def add(self, scores: Floats, gradient: Floats, loss: float, *, is_linear: bool) -> Observation | None:
        """Add a sampled step, and return an observation if all steps so far agree.

        Args:
            scores: Outputs of the only forward call of the step, of shape (N, ...).
            gradient: Their gradient.
            loss: Value of the loss.
            is_linear: Whether a linear layer computes the outputs. Other scores may be similarities, where the first is
                meant to be the largest.
        """
        self._steps += 1
        self.is_over |= self._steps >= MAX_STEPS
        mean, label = _shared_gradient(scores, gradient), _shared_label(scores, gradient) if is_linear else None
        target = None if mean is not None else _shared_target(scores, gradient, loss)
        self._gradients = [*self._gradients, mean] if mean is not None else []
        self._targets = [*self._targets, target] if target is not None else []
        self._labels = [*self._labels, label] if label is not None else []
        self._largest = max(self._largest, float(np.abs(scores).max()), abs(target or 0.0))
        self._num_labels = self._num_labels + len(scores) if self._labels else 0
        observation = self._judge(len(scores))
        self.is_over |= observation is not None
        return observation

    def _judge(self, samples: int) -> Observation | None:
        if len(self._gradients) >= MIN_STEPS and np.ptp(self._gradients) > MIN_CHANGE * np.abs(self._gradients).max():
            return OUTPUTS_AVERAGED.observe(values={"samples": samples})
        # with two values, samples may be either real or generated
        if len(self._targets) >= MIN_STEPS and _num_different(self._targets, scale=self._largest) > 2:
            return TARGETS_SHARED.observe(values={"samples": samples})
        is_one = len(set(self._labels)) == 1 and len(self._labels) >= MIN_LABEL_STEPS
        if is_one and self._num_labels >= MIN_LABELS:
            return LABELS_EQUAL.observe(values={"labels": self._num_labels, "class": self._labels[0]})
        return None


def _shared_gradient(scores: Floats, gradient: Floats) -> float | None:
    """Return the largest entry of a gradient that all samples share, times their number; None if they differ."""
    if not _is_same(gradient) or _is_same(scores):
        return None
    row = gradient[0].ravel()
    return float(row[np.abs(row).argmax()]) * len(gradient)


def _shared_target(scores: Floats, gradient: Floats, loss: float) -> float | None:
    """Return the target of a squared error, if it is the same for all samples of a batch."""
    targets = targets_of_squares(scores, gradient, loss)
    if targets is None or targets.size != len(targets) or not _is_same(targets, scale=np.abs(scores).max()):
        return None
    return float(targets.mean())


def _shared_label(scores: Floats, gradient: Floats) -> int | None:
    """Return the label of a cross entropy, if it is the same for all samples of a batch."""
    if scores.ndim != 2 or scores.shape[1] < MIN_CLASSES:
        return None
    labels_N = labels_of_classes(scores, gradient)
    return int(labels_N[0]) if labels_N is not None and len(labels_N) and (labels_N == labels_N[0]).all() else None


def _is_same(values: Floats, *, scale: float = 0.0) -> bool:
    """Return whether all samples have the same numbers."""
    return bool(np.ptp(values, axis=0).max() <= EQUAL * max(np.abs(values).max(), scale))


def _num_different(numbers: list[float], *, scale: float) -> int:
    return 1 + int((np.diff(np.sort(numbers)) > MIN_CHANGE * scale).sum())
