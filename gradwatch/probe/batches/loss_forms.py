"""Match a gradient with a loss function: its form reveals the targets, and how well predictions fit them."""

# N = samples (positions, if each sample has several), C = classes

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES = 8
"""Minimum number of samples to compare with each other."""

MAX_GRADIENT_ERROR = 0.01
"""Maximum relative error of a gradient that matches a loss function: bfloat16 has 0.004."""

Floats = NDArray[np.float64]


class PairingGain(NamedTuple):
    """Loss of the best constant, and the rise of the loss if each prediction belonged to another sample.

    The gain is a mean over samples; `variance` is the variance of that mean.
    """

    constant: float
    gain: float
    variance: float


class LabeledScores(NamedTuple):
    """Scores whose labels the gradient of a cross entropy has revealed.

    Args:
        scores: Log-probabilities of shape (N, C); logits of any shape for a binary cross entropy.
        labels: Label of each sample, of shape (N,); the labels of a binary cross entropy, in the shape of the scores.
    """

    scores: Floats
    labels: NDArray[np.int64]

    @property
    def is_binary(self) -> bool:
        """Return whether each score decides between two classes."""
        return self.scores.shape == self.labels.shape

    @property
    def predicted(self) -> NDArray[np.int64]:
        """Return the most likely class of each label."""
        classes: NDArray[np.int64] = (self.scores > 0).astype(np.int64) if self.is_binary else self.scores.argmax(1)
        return classes

    def gain(self) -> PairingGain:
        """Return the gain of predictions with their own labels."""
        if self.is_binary:
            labels = self.labels.astype(np.float64)
            return PairingGain(_entropy(labels) + _entropy(1 - labels), *_covariance(self.scores, labels))
        labels_NC = np.eye(self.scores.shape[1])[self.labels]
        return PairingGain(_entropy(labels_NC), *_covariance(self.scores, labels_NC))


def of_classes(scores: Floats, gradient: Floats, dim: int) -> LabeledScores | None:
    """Match a cross entropy of scores, or a likelihood of log-probabilities, over one dimension."""
    size = scores.shape[dim]
    scores_NC, gradient_NC = (np.moveaxis(t, dim, -1).reshape(-1, size) for t in (scores, gradient))
    counts_N = gradient_NC.any(1)  # a gradient of zeros: the loss ignores this position
    if not counts_N.all():
        scores_NC, gradient_NC = scores_NC[counts_N], gradient_NC[counts_N]
    labels_N = labels_of_classes(scores_NC, gradient_NC)
    return None if labels_N is None else LabeledScores(_log_softmax(scores_NC), labels_N)


def labels_of_classes(scores_NC: Floats, gradient_NC: Floats) -> NDArray[np.int64] | None:
    """Return the labels of a cross entropy of scores, or of a likelihood of log-probabilities, of shape (N,).

    None if the loss has another form.
    """
    samples, size = scores_NC.shape
    if size < 2 or samples < MIN_SAMPLES:
        return None
    # only the gradient of the right class is negative
    labels_N = gradient_NC.argmin(1)
    labels_NC = np.eye(size)[labels_N]
    # the first is the gradient of a cross entropy, the second that of a likelihood
    is_entropy = _is_multiple(gradient_NC, np.exp(_log_softmax(scores_NC)) - labels_NC)
    return labels_N if is_entropy or _is_multiple(gradient_NC, -labels_NC) else None


def _log_softmax(scores_NC: Floats) -> Floats:
    above_NC: Floats = scores_NC - scores_NC.max(1, keepdims=True)
    sums_N1: Floats = np.exp(above_NC).sum(1, keepdims=True)
    return above_NC - np.log(sums_N1)


def of_labels(scores: Floats, gradient: Floats) -> LabeledScores | None:
    """Match a binary cross entropy of scores, or of probabilities."""
    labels = (gradient < 0).astype(np.int64)
    sides = 2 * labels - 1
    if not _is_multiple(gradient, 1 / (1 + np.exp(-scores)) - labels):
        # the gradient of log(1 - p) or log(p); nan if a score is not a probability, which matches nothing
        scores = np.where((scores >= 0) & (scores <= 1), scores, math.nan)
        if not _is_multiple(gradient, -sides / np.abs(1 - labels - scores)):
            return None
        scores = np.log(scores / (1 - scores))
    return LabeledScores(scores, labels)


def of_squares(scores: Floats, gradient: Floats, loss: float) -> PairingGain | None:
    """Match a squared error."""
    targets = targets_of_squares(scores, gradient, loss)
    if targets is None:
        return None
    return PairingGain(_covariance(targets, targets)[0], *_covariance(2 * scores, targets))


def targets_of_squares(scores: Floats, gradient: Floats, loss: float) -> Floats | None:
    """Return the targets of a squared error, whose value follows from the differences in its gradient.

    None if the loss has another form.
    """
    # the factor of the squares in the loss: a mean over all values, over samples, or a sum; each also with 1/2
    steepness = dot(gradient, gradient) / (4 * loss) if loss > 0 else 0.0
    usual = [share / number for number in (scores.size, len(scores), 1) for share in (1, 0.5)]
    if not any(abs(steepness - one) <= MAX_GRADIENT_ERROR * one for one in usual):
        return None
    return scores - gradient / (2 * steepness)


def _is_multiple(gradient: Floats, expected: Floats) -> bool:
    """Return whether a gradient is a positive multiple of the expected one."""
    factor = dot(gradient, expected) / dot(expected, expected)
    rest = gradient - factor * expected
    return bool(factor > 0 and dot(rest, rest) < MAX_GRADIENT_ERROR**2 * dot(gradient, gradient))


def root_mean_square(values: Floats) -> float:
    """Return the root of the mean of the squares."""
    return float(np.sqrt(np.square(values).mean()))


def dot(a: Floats, b: Floats) -> np.float64:
    # not `np.vdot`, which uses BLAS: its threads compete with the training for processors, 8 ms a call instead of 0.05
    total: np.float64 = (a * b).sum()
    return total


def _covariance(scores: Floats, targets: Floats) -> tuple[float, float]:
    """Return the covariance of scores and targets, summed over the values of a sample, and its variance.

    Maps and sequences are centered over all values, so that knowing the mean of each position counts as knowledge.
    """
    both = (scores - scores.mean(_pooled_dims(scores))) * (targets - targets.mean(_pooled_dims(targets)))
    terms_N = both.reshape(len(both), -1).sum(1)
    return float(terms_N.mean()), float(terms_N.var(ddof=1)) / len(terms_N)


def _entropy(labels: Floats) -> float:
    """Return the contribution of the labels that are 1 to the entropy of the frequencies, in nats per sample."""
    shares = labels.mean(_pooled_dims(labels), keepdims=True)
    # the smallest number instead of 0, so that 0 * log(0) is 0
    terms = -shares * np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    return float(terms.mean()) * math.prod(labels.shape[1:])


def _pooled_dims(values: Floats) -> tuple[int, ...]:
    # maps and sequences are pooled over all positions
    return tuple(range(values.ndim)) if values.ndim > 2 else (0,)
