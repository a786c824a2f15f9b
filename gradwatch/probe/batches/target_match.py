"""Compare predictions with their own targets and with other samples' targets: if both fit alike, nothing is learned."""

# N = samples (positions, if each sample has several), C = classes

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, critical_sigmas
from gradwatch.events import PAIRED, UNCLEAR, UNPAIRED, EventKind, Observation
from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values, tensors_of

WINDOW_SAMPLES = 8
"""Number of sampled steps to judge together: with 32 samples each, chance explains 1 % of the loss."""

NO_FIT, FIT, GOOD_FIT = 0.03, 0.06, 0.2
"""Limits of the fraction of the loss of the best constant that predictions explain.

Below the first limit, predictions do not fit; `loss-plateau` uses the same limit for a fall of the loss. At the second
limit, predictions fit again. At the third limit, reading ends.
"""

SURE_ERRORS = 5.0
"""Minimum gain, in standard errors, at which something is learned, however little: clicks may explain no more.

Memorized samples reach less, 3 to 4.
"""

SURE_WINDOWS = 4
"""Windows that are judged together for such a gain: four windows halve its standard error."""

MEMORY_SAMPLES = 128
"""Number of sampled steps whose trend is judged."""

WINDOWS_AHEAD = 4
"""Future spans, as long as all sampled steps so far, for which predictions must be sure not to fit."""

MIN_SAMPLES = 8
"""Minimum number of samples to compare with each other."""

MAX_CALLS = 8
"""Maximum number of forward calls of a step: with more, the loop runs over something other than samples."""

MAX_VALUES = 65536
"""Maximum number of values to read of one call: of the leading samples, and if 8 samples have more, of some positions
in each."""

MAX_GRADIENT_ERROR = 0.01
"""Maximum relative error of a gradient that matches a loss function: bfloat16 has 0.004."""

MAX_CHANGES = 8
"""Maximum number of events of one run."""

Floats = NDArray[np.float64]


class PairingGain(NamedTuple):
    """Loss of the best constant, and the rise of the loss if each prediction belonged to another sample.

    The gain is a mean over samples; `variance` is the variance of that mean.
    """

    constant: float
    gain: float
    variance: float


class Explained(NamedTuple):
    """Fraction of the loss of the best constant that predictions explain, and whether the fraction exceeds chance."""

    share: float
    is_sure: bool


def explained_share(gains: Sequence[PairingGain]) -> Explained:
    """Return the fraction of the loss that predictions explain over some steps.

    Args:
        gains: At least one.
    """
    constant, gain, variance = (sum(column) for column in zip(*gains, strict=True))
    share = gain / (2 * constant) if constant > 0 else 1.0  # the loss falls by half of the gain
    return Explained(share, gain > SURE_ERRORS * math.sqrt(variance))


def highest_share(gains: Sequence[PairingGain], *, sampled: int) -> float:
    """Return an upper bound of the fraction of the loss that predictions will explain, if their trend goes on.

    A model that learns slowly explains nothing at first. Few or noisy samples give a high bound, because they would
    not show such a trend.

    Args:
        gains: At least two sampled steps, at equal distances.
        sampled: Number of all sampled steps of the run so far, at each of which a bound may be too low.
    """
    sigmas = _bound_sigmas(sampled)
    gains_T, variances_T = (np.array([getattr(g, field) for g in gains]) for field in ("gain", "variance"))
    place_T: Floats = np.arange(len(gains), dtype=np.float64) - (len(gains) - 1) / 2
    square = _dot(place_T, place_T)
    slope, slope_variance = _dot(place_T, gains_T) / square, _dot(place_T**2, variances_T) / square**2
    newest = slice(-WINDOW_SAMPLES, None)
    level, level_variance = gains_T[newest].mean(), variances_T[newest].mean() / len(gains_T[newest])
    rise = max(0.0, slope + sigmas * math.sqrt(slope_variance))
    highest = level + sigmas * math.sqrt(level_variance) + WINDOWS_AHEAD * len(gains) * rise
    constant = sum(gain.constant for gain in gains) / len(gains)
    return float(highest / (2 * constant)) if constant > 0 else 1.0  # as in `explained_share`


def _bound_sigmas(sampled: int) -> float:
    """Return the standard errors that a bound is above its estimate, so that hardly any bound of the run is too low.

    While the sampled steps double, one sum grows. That it passes a bound at any step is at most twice as likely as that
    it does so at the last one (Lévy's inequality). So one look is spent per doubling.
    """
    look = (sampled // WINDOW_SAMPLES).bit_length()
    sides = 2 * 2 * max(1, sampled // MEMORY_SAMPLES)  # level and slope, twice each, in each window that is full
    return critical_sigmas(allowed_error(SequentialTest.UNPAIRED_TARGETS, look, among=sides))


@final
class FitState:
    """Decide over the sampled steps of a run whether predictions fit, with hysteresis, and when to stop reading.

    Attributes:
        is_over: Whether nothing more is read: the fit is good or changed too often, or the loss has another form.
    """

    def __init__(self) -> None:
        self._gains: deque[PairingGain] = deque(maxlen=MEMORY_SAMPLES)
        self._judgment: EventKind | None = None  # until a window is full
        self._changes = self._misses = self._sampled = 0
        self.is_over = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        gains = [list(gain) for gain in self._gains]  # lists, since a tuple of a class is no plain data
        judgment = self._judgment.name if self._judgment else ""
        counts = {"changes": self._changes, "misses": self._misses, "sampled": self._sampled}
        return {"looks": gains, "judgment": judgment, "is_over": self.is_over, **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._gains = deque((PairingGain(*gain) for gain in state["looks"]), maxlen=MEMORY_SAMPLES)
        # checkpoints of earlier versions have a flag only
        judgment = state.get("judgment", UNPAIRED.name if state.get("is_unpaired") else "")
        self._judgment = next((kind for kind in (UNPAIRED, PAIRED, UNCLEAR) if kind.name == judgment), None)
        self.is_over = state["is_over"]
        self._changes, self._misses = state["changes"], state["misses"]
        self._sampled = state.get("sampled", len(self._gains))

    def add(self, gain: PairingGain | None) -> Observation | None:
        """Add a sampled step, and return an observation if it changes whether predictions fit.

        Args:
            gain: Gain of the step, or None if its loss has another form.
        """
        if gain is None:
            # tolerated as long as they are not a window more than the steps that matched
            self._misses += 1
            self.is_over |= self._misses > len(self._gains) + WINDOW_SAMPLES
            return None
        self._gains.append(gain)
        self._sampled += 1
        if len(self._gains) < WINDOW_SAMPLES:
            return None
        gains = list(self._gains)
        share = explained_share(gains[-WINDOW_SAMPLES:]).share
        before, self._judgment = self._judgment, self._judge(gains, share)
        self.is_over |= share >= GOOD_FIT
        # a good fit from the beginning shows in the loss, too, and is no news
        if self._judgment is before or (before is None and share >= GOOD_FIT):
            return None
        self._changes += 1
        self.is_over |= self._changes == MAX_CHANGES
        return self._judgment.observe(values={"explained": share})

    def _judge(self, gains: list[PairingGain], share: float) -> EventKind:
        """Return whether predictions fit. Without evidence for or against it, the judgment stays the same."""
        # a small fit may take several windows to show
        windows = (gains[-WINDOW_SAMPLES:], gains[-SURE_WINDOWS * WINDOW_SAMPLES :])
        if share >= FIT or any(explained_share(window).is_sure for window in windows):
            return PAIRED
        if share < NO_FIT and highest_share(gains, sampled=self._sampled) < GOOD_FIT:
            return UNPAIRED
        return self._judgment or UNCLEAR


class OutputSlice(NamedTuple):
    """The part of an output that is read.

    Args:
        dims: Dimensions that may hold the classes; each is read completely.
        place: Index of the part in the output.
    """

    dims: tuple[int, ...]
    place: tuple[slice, ...]


class OutputCall(NamedTuple):
    """A forward call with an output that has received its gradient.

    Args:
        size: Elements of the output.
        slices: Parts of the output that were read.
        scores: Values of each part.
        gradients: Gradient of each part.
    """

    size: int
    slices: list[OutputSlice]
    scores: list[Tensor]
    gradients: list[Tensor]


@final
class TargetMatch:
    """Read predictions and their gradients, which reveal the targets, on steps that sample activations.

    The gradient of a cross entropy is the prediction minus the label, and of a squared error a multiple of their
    difference. So the probe knows the targets without asking for them. If a model has learned only the mean of the
    targets, a prediction fits any other sample as well as its own. Losses of another form are ignored, and so are
    outputs on a GPU, since reading them would wait.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._read: list[OutputCall] = []
        self._calls = 0
        self._fit = FitState()

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is read."""
        return self._fit.is_over

    def begin(self) -> None:
        """Prepare for the next sampled step."""
        self.clear()

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        remove_hooks(self._handles)
        self._read = []
        self._calls = 0

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        return self._fit.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._fit.restore(state)

    def watch(self, output: Any) -> None:
        """Hook the output of a model, to read its gradient in the next backward pass."""
        found = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
        self._calls += 1
        if len(found) != 1 or self.is_over or self._calls > MAX_CALLS:  # of several outputs, any may be the prediction
            return
        (scores,) = found
        if scores.is_cpu and scores.ndim and len(scores) >= MIN_SAMPLES:
            self._handles.append(scores.register_hook(inert_hook(_OutputHook(self._read, scores.detach()))))

    def find(self, loss: Any) -> Iterator[Observation]:
        """Yield an observation, after a backward pass, if predictions ceased to fit their targets, or fit again.

        Args:
            loss: Loss of the step, as the loop passed it.
        """
        if not self._calls:  # not a sampled step
            return
        # a call without a gradient does not belong to the loss; scores that are not probabilities overflow
        with np.errstate(all="ignore"):
            gain = _gain(self._read, loss) if 0 < len(self._read) == self._calls <= MAX_CALLS else None
        self.clear()
        if observation := self._fit.add(gain):
            yield observation


@final
class _OutputHook:
    """Hook of an output that keeps its gradient."""

    def __init__(self, read: list[OutputCall], scores: Tensor) -> None:
        self._read = read
        self._slices = slices_of(scores.shape)
        # clones: the loop may change the output in place, and a view would keep all of it
        self._scores = [scores[part.place].clone() for part in self._slices]

    def __call__(self, gradient: Tensor) -> None:
        if not has_plain_values(gradient):  # of many backward passes at once
            return
        gradients = [gradient.detach()[part.place].clone() for part in self._slices]
        self._read.append(OutputCall(gradient.numel(), self._slices, self._scores, gradients))


def slices_of(shape: Sequence[int]) -> list[OutputSlice]:
    """Return the parts of an output to read: the leading samples, or one part for each dimension of the classes.

    Only the gradient shows whether the classes are in the second or in the last dimension.
    """
    samples = min(shape[0], max(MIN_SAMPLES, MAX_VALUES * shape[0] // max(1, math.prod(shape))))
    dims = tuple(dict.fromkeys((len(shape) - 1, 1))) if len(shape) > 1 else ()
    if len(shape) < 3 or samples * math.prod(shape[1:]) <= MAX_VALUES:
        return [OutputSlice(dims, (slice(samples),))]
    return [OutputSlice((dim,), _spread(shape, samples, dim)) for dim in dims]


def _spread(shape: Sequence[int], samples: int, whole: int) -> tuple[slice, ...]:
    """Return the index of leading samples, of all of one dimension, and of evenly spread positions in the others."""
    place = [slice(samples), *map(slice, shape[1:])]
    budget = MAX_VALUES // 2 // (samples * shape[whole])  # either dimension has a part
    others = [d for d in range(1, len(shape)) if d != whole]
    for left, d in zip(range(len(others), 0, -1), others, strict=True):
        number = min(shape[d], max(1, int(budget ** (1 / left))))
        every = shape[d] // number
        place[d] = slice(every // 2, every // 2 + every * (number - 1) + 1, every)
        budget //= number  # a short dimension leaves its share to the others
    return tuple(place)


def _gain(read: list[OutputCall], loss: Any) -> PairingGain | None:
    """Return the gain of all predictions of a step with their own targets; None if the loss has another form."""
    first, *others = read
    if any(_shapes(call) != _shapes(first) for call in others):
        return None
    values = [_concatenate(read, i) for i in range(len(first.slices))]
    scores, gradient = values[0]
    if not _dot(gradient, gradient) > 0:  # all zero, or NaN
        return None
    number = to_float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss
    is_whole = not others and isinstance(number, (float, int)) and first.size == scores.size
    of_classes = (_of_classes(*both, d) for both, part in zip(values, first.slices, strict=True) for d in part.dims)
    return (
        next(filter(None, of_classes), None)
        or _of_labels(scores, gradient)
        or (_of_squares(scores, gradient, float(number)) if is_whole else None)
    )


def _shapes(call: OutputCall) -> list[tuple[int, ...]]:
    # only the number of samples may differ
    return [tuple(scores.shape[1:]) for scores in call.scores]


def _concatenate(read: list[OutputCall], i: int) -> tuple[Floats, Floats]:
    """Return scores and gradients of one part of all calls, with at least one dimension after the samples."""
    parts = [[call.scores[i] for call in read], [call.gradients[i] for call in read]]
    scores, gradient = (np.concatenate([*map(_doubles, part)]) for part in parts)
    return (scores[:, None], gradient[:, None]) if scores.ndim == 1 else (scores, gradient)


def _doubles(values: Tensor) -> Floats:
    return to_host(values).astype(np.float64)


def _of_classes(scores: Floats, gradient: Floats, dim: int) -> PairingGain | None:
    """Match a cross entropy of scores, or a likelihood of log-probabilities, over one dimension."""
    size = scores.shape[dim]
    scores_NC, gradient_NC = (np.moveaxis(t, dim, -1).reshape(-1, size) for t in (scores, gradient))
    counts_N = gradient_NC.any(1)  # a gradient of zeros: the loss ignores this position
    if not counts_N.all():
        scores_NC, gradient_NC = scores_NC[counts_N], gradient_NC[counts_N]
    if size < 2 or len(scores_NC) < MIN_SAMPLES:
        return None
    # only the gradient of the right class is negative
    labels_NC = np.zeros_like(scores_NC)
    labels_NC[np.arange(len(labels_NC)), gradient_NC.argmin(1)] = 1.0
    above_NC = scores_NC - scores_NC.max(1, keepdims=True)
    powers_NC = np.exp(above_NC)
    sums_N1 = powers_NC.sum(1, keepdims=True)
    # the first is the gradient of a cross entropy, the second that of a likelihood
    if not (_is_multiple(gradient_NC, powers_NC / sums_N1 - labels_NC) or _is_multiple(gradient_NC, -labels_NC)):
        return None
    return PairingGain(_entropy(labels_NC), *_covariance(above_NC - np.log(sums_N1), labels_NC))


def _of_labels(scores: Floats, gradient: Floats) -> PairingGain | None:
    """Match a binary cross entropy of scores, or of probabilities."""
    labels = (gradient < 0).astype(np.float64)
    sides = 2 * labels - 1
    if not _is_multiple(gradient, 1 / (1 + np.exp(-scores)) - labels):
        # the gradient of log(1 - p) or log(p); nan if a score is not a probability, which matches nothing
        scores = np.where((scores >= 0) & (scores <= 1), scores, math.nan)
        if not _is_multiple(gradient, -sides / np.abs(1 - labels - scores)):
            return None
        scores = np.log(scores / (1 - scores))
    return PairingGain(_entropy(labels) + _entropy(1 - labels), *_covariance(scores, labels))


def _of_squares(scores: Floats, gradient: Floats, loss: float) -> PairingGain | None:
    """Match a squared error: its value follows from the differences in its gradient."""
    # the factor of the squares in the loss: a mean over all values, over samples, or a sum; each also with 1/2
    steepness = _dot(gradient, gradient) / (4 * loss) if loss > 0 else 0.0
    usual = [share / number for number in (scores.size, len(scores), 1) for share in (1, 0.5)]
    if not any(abs(steepness - one) <= MAX_GRADIENT_ERROR * one for one in usual):
        return None
    targets = scores - gradient / (2 * steepness)
    return PairingGain(_covariance(targets, targets)[0], *_covariance(2 * scores, targets))


def _is_multiple(gradient: Floats, expected: Floats) -> bool:
    """Return whether a gradient is a positive multiple of the expected one."""
    factor = _dot(gradient, expected) / _dot(expected, expected)
    rest = gradient - factor * expected
    return bool(factor > 0 and _dot(rest, rest) < MAX_GRADIENT_ERROR**2 * _dot(gradient, gradient))


def _dot(a: Floats, b: Floats) -> np.float64:
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
