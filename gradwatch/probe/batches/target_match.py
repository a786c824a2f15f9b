"""Compare predictions with their own targets and with those of other samples: who fits both alike knows nothing."""

# N = samples (places, where each has several), C = classes

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.probe.nested import tensors_of

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
"""Numbers of one call read: those of the leading samples, and where eight have more, of some places in each."""

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


class Part(NamedTuple):
    """What is read of an output.

    Args:
        dims: Dimensions that the classes may be in, all of which are read.
        place: Where it lies in the output.
    """

    dims: tuple[int, ...]
    place: tuple[slice, ...]


class Call(NamedTuple):
    """A forward call whose backward pass has come by.

    Args:
        size: How many numbers the output has.
        parts: What was read of it.
        scores: The output, of each part.
        gradients: Its gradient, likewise.
    """

    size: int
    parts: list[Part]
    scores: list[Tensor]
    gradients: list[Tensor]


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
        self._read: list[Call] = []
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
            self._handles.append(scores.register_hook(_Read(self._read, scores.detach())))

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

    def __init__(self, read: list[Call], scores: Tensor) -> None:
        self._read = read
        self._parts = parts_of(scores.shape)
        self._scores = [scores[part.place].clone() for part in self._parts]

    def __call__(self, gradient: Tensor) -> None:
        gradients = [gradient.detach()[part.place].clone() for part in self._parts]
        self._read.append(Call(gradient.numel(), self._parts, self._scores, gradients))


def parts_of(shape: Sequence[int]) -> list[Part]:
    """Return what is read of an output: all of the leading samples, or one part for each dimension of the classes.

    Which one that is, the second or the last, shows by the gradient only.
    """
    samples = min(shape[0], max(FEWEST, MOST_VALUES * shape[0] // max(1, math.prod(shape))))
    dims = tuple(dict.fromkeys((len(shape) - 1, 1))) if len(shape) > 1 else ()
    if len(shape) < 3 or samples * math.prod(shape[1:]) <= MOST_VALUES:
        return [Part(dims, (slice(samples),))]
    return [Part((dim,), _spread(shape, samples, dim)) for dim in dims]


def _spread(shape: Sequence[int], samples: int, whole: int) -> tuple[slice, ...]:
    """Return leading samples, all of one dimension, and of the others places that lie evenly."""
    place = [slice(samples), *map(slice, shape[1:])]
    room = MOST_VALUES // 2 // (samples * shape[whole])  # either dimension has a part
    others = [d for d in range(1, len(shape)) if d != whole]
    for left, d in zip(range(len(others), 0, -1), others, strict=True):
        number = min(shape[d], max(1, int(room ** (1 / left))))
        every = shape[d] // number
        place[d] = slice(every // 2, every // 2 + every * (number - 1) + 1, every)
        room //= number
    return tuple(place)


def _gain(read: list[Call], loss: Any) -> Gain | None:
    """Return what all predictions of a step gain by being those of their sample; None where the loss is another one."""
    first, *others = read
    if any(_shapes(call) != _shapes(first) for call in others):
        return None
    looked = [_joined(read, i) for i in range(len(first.parts))]
    scores, gradient = looked[0]
    if not _dot(gradient, gradient) > 0:
        return None
    value = to_float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss
    is_whole = not others and isinstance(value, (float, int)) and first.size == scores.size
    of_classes = (_of_classes(*both, d) for both, part in zip(looked, first.parts, strict=True) for d in part.dims)
    return (
        next(filter(None, of_classes), None)
        or _of_labels(scores, gradient)
        or (_of_squares(scores, gradient, float(value)) if is_whole else None)
    )


def _shapes(call: Call) -> list[tuple[int, ...]]:
    """Return what the parts of calls that are taken together have in common."""
    return [tuple(scores.shape[1:]) for scores in call.scores]


def _joined(read: list[Call], i: int) -> tuple[Floats, Floats]:
    """Return scores and gradients of one part of all calls, with a dimension behind the samples."""
    parts = [[call.scores[i] for call in read], [call.gradients[i] for call in read]]
    scores, gradient = (np.concatenate([*map(_doubles, part)]) for part in parts)
    return (scores[:, None], gradient[:, None]) if scores.ndim == 1 else (scores, gradient)


def _doubles(values: Tensor) -> Floats:
    return to_host(values).astype(np.float64)


def _of_classes(scores: Floats, gradient: Floats, dim: int) -> Gain | None:
    """Look for a cross entropy of scores, or a likelihood of their logarithms, over one dimension."""
    size = scores.shape[dim]
    scores_NC, gradient_NC = (np.moveaxis(t, dim, -1).reshape(-1, size) for t in (scores, gradient))
    counts_N = gradient_NC.any(1)  # no loss comes of the places that are ignored
    if not counts_N.all():
        scores_NC, gradient_NC = scores_NC[counts_N], gradient_NC[counts_N]
    if size < 2 or len(scores_NC) < FEWEST:
        return None
    labels_NC = np.zeros_like(scores_NC)
    labels_NC[np.arange(len(labels_NC)), gradient_NC.argmin(1)] = 1.0
    above_NC = scores_NC - scores_NC.max(1, keepdims=True)
    powers_NC = np.exp(above_NC)
    sums_N1 = powers_NC.sum(1, keepdims=True)
    if not (_is_multiple(gradient_NC, powers_NC / sums_N1 - labels_NC) or _is_multiple(gradient_NC, -labels_NC)):
        return None
    return Gain(_entropy(labels_NC), *_covariance(above_NC - np.log(sums_N1), labels_NC))


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
    steepness = _dot(gradient, gradient) / (4 * loss) if loss > 0 else 0.0  # of loss = steepness * squares
    usual = [share / number for number in (scores.size, len(scores), 1) for share in (1, 0.5)]
    if not any(abs(steepness - one) <= EXACT * one for one in usual):
        return None
    targets = scores - gradient / (2 * steepness)
    return Gain(_covariance(targets, targets)[0], *_covariance(2 * scores, targets))


def _is_multiple(gradient: Floats, expected: Floats) -> bool:
    """Say whether a gradient is what is expected, but for a factor."""
    factor = _dot(gradient, expected) / _dot(expected, expected)
    rest = gradient - factor * expected
    return bool(factor > 0 and _dot(rest, rest) < EXACT**2 * _dot(gradient, gradient))


def _dot(a: Floats, b: Floats) -> np.float64:
    """Return the sum of the products of values at like places.

    Not by `np.vdot`, whose BLAS shares so many numbers out to threads of its own: beside a training these wait for a
    processor, 8 ms a call where this takes 0.05.
    """
    total: np.float64 = (a * b).sum()
    return total


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
