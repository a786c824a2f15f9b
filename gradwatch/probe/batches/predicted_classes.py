"""Judge over sampled steps whether a classifier predicts nothing but the majority class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from gradwatch.events import MAJORITY_PREDICTED, MINORITY_PREDICTED, Observation
from gradwatch.probe.batches.loss_forms import LabeledScores

MIN_STEPS = 8
"""Sampled steps in a row with predictions of one class that decide."""

MAX_VARIED = 32
"""Sampled steps in a row with predictions of several classes after which nothing more is read. The first outputs are
near the threshold, so that both classes are predicted before a model has learned which one is rare."""

MIN_OTHERS = 16
"""Labels of other classes that must have been read: a model that finds a fifth of them would have found one (97 %)."""

MAX_OTHERS = 0.2
"""Largest fraction of labels of other classes. Classes with more are not rare: Google, Machine Learning Crash Course,
"Imbalanced datasets", https://developers.google.com/machine-learning/crash-course/overfitting/imbalanced-datasets. A
language model never predicts most of its tokens, but no token has so many of the labels."""


@final
class PredictedClasses:
    """Count the labels of the sampled steps in a row whose predictions are all one class.

    All labels and predictions of a step count: of the samples, the positions of a sequence or a map, or the many labels
    of one sample, which are yes or no.

    Attributes:
        is_over: Whether nothing more is read: several classes are predicted, no class is rare, or the loss has another
            form.
    """

    def __init__(self) -> None:
        self._class = -1  # the only one that is predicted
        self._steps = self._labels = self._others = 0  # since then
        self._varied = self._misses = self._matches = 0
        self._is_reported = self.is_over = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        return {
            "class": self._class,
            "steps": self._steps,
            "labels": self._labels,
            "others": self._others,
            "varied": self._varied,
            "misses": self._misses,
            "matches": self._matches,
            "is_reported": self._is_reported,
            "is_over": self.is_over,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._class, self._steps, self._labels, self._others = (
            state[key] for key in ("class", "steps", "labels", "others")
        )
        self._varied, self._misses, self._matches = state["varied"], state["misses"], state["matches"]
        self._is_reported, self.is_over = state["is_reported"], state["is_over"]

    def add(self, labeled: LabeledScores | None) -> Observation | None:
        """Add a sampled step, and return an observation if it decides whether one class is all that is predicted.

        Args:
            labeled: Predictions of the step with their labels, or None if its loss has another form.
        """
        if self.is_over:
            return None
        if labeled is None:
            self._misses += 1
            self.is_over = self._misses > self._matches + MIN_STEPS
            return None
        self._matches += 1
        predicted = labeled.predicted
        least, most = int(predicted.min()), int(predicted.max())
        if least != most or least != self._class:
            if self._is_reported:
                self.is_over = True
                return MINORITY_PREDICTED.observe()
            self._class, self._steps, self._labels, self._others = least if least == most else -1, 0, 0, 0
        if least != most:
            self._varied += 1
            self.is_over = self._varied == MAX_VARIED
            return None
        self._varied = 0
        self._steps += 1
        self._labels += predicted.size
        self._others += int((labeled.labels != least).sum())
        return self._judge()

    def _judge(self) -> Observation | None:
        if self._is_reported or self._steps < MIN_STEPS or self._others < MIN_OTHERS:
            return None
        share = 1 - self._others / self._labels
        self._is_reported = 1 - share <= MAX_OTHERS
        self.is_over = not self._is_reported
        if self.is_over:
            return None
        return MAJORITY_PREDICTED.observe(values={"class": self._class, "share": share, "others": self._others})
