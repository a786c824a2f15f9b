"""Compare predictions with their own targets and with those of other samples: who fits both alike knows nothing."""

# N = samples (places, where each has several), C = classes

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.functions import tensors_of
from gradwatch.probe.transfer import to_float, to_host

LOOKS = 8
"""Looks in a row that are judged together: of 32 samples each, chance alone makes a hundredth of the loss."""

NOTHING, SOMETHING, MUCH = 0.03, 0.06, 0.2
"""Share of what a constant leaves open that predictions explain: below the first, which is the fall that counts as one
in `loss-plateau`, it is nothing, from the second on it is something again, and at the third nobody looks any more."""

SURE = 5.0
"""Gain in its standard errors from which on something is learned, however little: clicks may explain no more. What is
known by heart of samples that come again is less, 3 to 4."""

FEWEST = 8
"""Samples from which on there are others to compare with."""

MOST_CALLS = 8
"""Forward calls of a step beyond which it is a loop over something else than samples."""

MOST_VALUES = 65536
"""Numbers of one call that are read: those of the leading samples."""

EXACT = 0.01
"""Error of a gradient, as a fraction, up to which it is that of a loss function: bfloat16 has 0.004."""

CHANGES = 8
"""Times that it is told at most."""

Floats = NDArray[np.float64]

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


class Gain(NamedTuple):
    """Loss of the best constant, and by how much that of the predictions grew if each were given to another sample.

    The gain is a mean over samples; `variance` is that of the mean.
    """

    constant: float
    gain: float
    variance: float


@final
class Pairings:
    """Reads predictions and their gradients, which tell the targets, on the steps that look at activations.

    The gradient of a cross entropy is the prediction minus the label, that of a squared error their difference: so what
    the loss compares with is known without asking for it. If the mean of the targets is all that was learned, a
    prediction is as good for any other sample as for its own. Losses of another form are left alone, and so are outputs
    on a GPU, since reading them would wait.

    Attributes:
        is_over: Whether nothing more is looked at: much is explained, or the loss is of another form.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._read: list[tuple[Tensor, Tensor]] = []
        self._calls = 0
        self._looks: deque[Gain] = deque(maxlen=LOOKS)
        self._is_unpaired = False
        self._changes = self._misses = 0
        self.is_over = False

    def begin(self) -> None:
        """Make ready for the next step that is looked at, and forget the one before."""
        self.clear()

    def clear(self) -> None:
        """Forget the step before, and take off what hooks it has left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._read = []
        self._calls = 0

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` takes back."""
        looks = [list(gain) for gain in self._looks]
        counts = {"changes": self._changes, "misses": self._misses}
        return {"looks": looks, "is_unpaired": self._is_unpaired, "is_over": self.is_over, **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._looks = deque((Gain(*look) for look in state["looks"]), maxlen=LOOKS)
        self._is_unpaired, self.is_over = state["is_unpaired"], state["is_over"]
        self._changes, self._misses = state["changes"], state["misses"]

    def look(self, output: Any) -> None:
        """Have the gradient of a model's output read, in the backward pass to come."""
        found = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
        self._calls += 1
        if len(found) != 1 or self.is_over or self._calls > MOST_CALLS:
            return
        (scores,) = found
        if scores.is_cpu and scores.ndim and len(scores) >= FEWEST:
            kept = _leading(scores)
            self._handles.append(scores.register_hook(_Read(self._read, scores.detach()[:kept].clone())))

    def facts(self, loss: Any) -> Iterator[Fact]:
        """Yield, after a backward pass, that predictions have begun or ceased to fit any sample as well as their own.

        Args:
            loss: Loss of the step, as the loop handed it over.
        """
        if not self._calls:
            return
        with np.errstate(all="ignore"):  # of scores that are no probabilities, or none of the loss that is looked for
            gain = _gain(self._read, loss) if 0 < len(self._read) == self._calls <= MOST_CALLS else None
        self.clear()
        if gain is None:
            self._misses += 1
            self.is_over |= self._misses > len(self._looks) + LOOKS
            return
        self._looks.append(gain)
        whole, more, variance = (sum(column) for column in zip(*self._looks, strict=True))
        share = more / (2 * whole) if whole > 0 else 1.0  # half of it is what the loss is lower by
        is_sure = more > SURE * math.sqrt(variance)
        is_unpaired = not is_sure and share < (SOMETHING if self._is_unpaired else NOTHING)
        if len(self._looks) < LOOKS or is_unpaired is self._is_unpaired:
            self.is_over |= share >= MUCH and len(self._looks) == LOOKS
            return
        self._is_unpaired, self._changes = is_unpaired, self._changes + 1
        self.is_over |= self._changes == CHANGES
        text = "predictions fit any other sample as well as their own" if self._is_unpaired else "predictions fit"
        yield "outputs-unpaired" if self._is_unpaired else "outputs-paired", None, text, {"explained": share}


@final
class _Read:
    """The hook on an output: it notes the gradient that arrives."""

    def __init__(self, read: list[tuple[Tensor, Tensor]], scores: Tensor) -> None:
        self._read, self._scores = read, scores

    def __call__(self, gradient: Tensor) -> None:
        self._read.append((self._scores, gradient.detach()[: len(self._scores)].clone()))


def _leading(scores: Tensor) -> int:
    """Return how many samples of an output are read."""
    return max(FEWEST, MOST_VALUES * len(scores) // max(1, scores.numel()))


def _gain(read: list[tuple[Tensor, Tensor]], loss: Any) -> Gain | None:
    """Return what all predictions of a step gain by being those of their sample; None where the loss is another one."""
    if any(scores.shape[1:] != read[0][0].shape[1:] for scores, _ in read):
        return None
    scores, gradient = (np.concatenate([*map(_doubles, parts)]) for parts in zip(*read, strict=True))
    if scores.ndim == 1:
        scores, gradient = scores[:, None], gradient[:, None]
    if not np.vdot(gradient, gradient) > 0:
        return None
    value = to_float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss
    is_whole = len(read) == 1 and isinstance(value, (float, int)) and _leading(read[0][0]) >= len(scores)
    return (
        _of_classes(scores, gradient)
        or _of_labels(scores, gradient)
        or (_of_squares(scores, gradient, float(value)) if is_whole else None)
    )


def _doubles(values: Tensor) -> Floats:
    return to_host(values).astype(np.float64)


def _of_classes(scores: Floats, gradient: Floats) -> Gain | None:
    """Look for a cross entropy of scores, or a likelihood of their logarithms, over one dimension."""
    for dim in sorted({1, scores.ndim - 1}) if scores.ndim > 1 else ():
        size = scores.shape[dim]
        scores_NC, gradient_NC = (np.moveaxis(t, dim, -1).reshape(-1, size) for t in (scores, gradient))
        counts_N = gradient_NC.any(1)  # no loss comes of the places that are ignored
        if not counts_N.all():
            scores_NC, gradient_NC = scores_NC[counts_N], gradient_NC[counts_N]
        if size < 2 or len(scores_NC) < FEWEST:
            continue
        labels_NC = np.zeros_like(scores_NC)
        labels_NC[np.arange(len(labels_NC)), gradient_NC.argmin(1)] = 1.0
        above_NC = scores_NC - scores_NC.max(1, keepdims=True)
        powers_NC = np.exp(above_NC)
        sums_N1 = powers_NC.sum(1, keepdims=True)
        if _is_multiple(gradient_NC, powers_NC / sums_N1 - labels_NC) or _is_multiple(gradient_NC, -labels_NC):
            return Gain(_entropy(labels_NC), *_covariance(above_NC - np.log(sums_N1), labels_NC))
    return None


def _of_labels(scores: Floats, gradient: Floats) -> Gain | None:
    """Look for a binary cross entropy of scores, or of probabilities."""
    labels = (gradient < 0).astype(np.float64)
    sides = 2 * labels - 1
    if not _is_multiple(gradient, 1 / (1 + np.exp(-scores)) - labels):
        # of 1 - p or p; nan where it is no probability, which is a multiple of nothing
        scores = np.where((scores >= 0) & (scores <= 1), scores, math.nan)
        if not _is_multiple(gradient, -sides / np.abs(1 - labels - scores)):
            return None
        scores = np.log(scores / (1 - scores))
    return Gain(_entropy(labels) + _entropy(1 - labels), *_covariance(scores, labels))


def _of_squares(scores: Floats, gradient: Floats, loss: float) -> Gain | None:
    """Look for a squared error: its value is that of the differences which its gradient is made of."""
    steepness = float(np.vdot(gradient, gradient)) / (4 * loss) if loss > 0 else 0.0  # of loss = steepness * squares
    usual = [share / number for number in (scores.size, len(scores), 1) for share in (1, 0.5)]
    if not any(abs(steepness - one) <= EXACT * one for one in usual):
        return None
    targets = scores - gradient / (2 * steepness)
    return Gain(_covariance(targets, targets)[0], *_covariance(2 * scores, targets))


def _is_multiple(gradient: Floats, expected: Floats) -> bool:
    """Say whether a gradient is what is expected, but for a factor."""
    factor = np.vdot(gradient, expected) / np.vdot(expected, expected)
    rest = gradient - factor * expected
    return bool(factor > 0 and np.vdot(rest, rest) < EXACT**2 * np.vdot(gradient, gradient))


def _covariance(scores: Floats, targets: Floats) -> tuple[float, float]:
    """Return the covariance of scores and targets, summed up over the values of a sample, and its variance.

    Of maps and sequences it is that over all values, so that to know what is usual at each place counts as knowing.
    """
    both = (scores - scores.mean(_alike(scores))) * (targets - targets.mean(_alike(targets)))
    terms_N = both.reshape(len(both), -1).sum(1)
    return float(terms_N.mean()), float(terms_N.var(ddof=1)) / len(terms_N)


def _entropy(labels: Floats) -> float:
    """Return what the ones of labels add to the entropy of their shares, in nats per sample."""
    shares = labels.mean(_alike(labels), keepdims=True)
    terms = -shares * np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    return float(terms.mean()) * math.prod(labels.shape[1:])


def _alike(values: Floats) -> tuple[int, ...]:
    """Return the dimensions over which values are of the same kind."""
    return tuple(range(values.ndim)) if values.ndim > 2 else (0,)
