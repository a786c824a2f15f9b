"""Compare predictions with their own targets and with other samples' targets: if both fit alike, nothing is learned."""

# N = samples (positions, if each sample has several), C = classes

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.events import FIRST_OUTPUTS, TARGETS_UNREACHABLE, Observation
from gradwatch.probe.batches.loss_forms import (
    MIN_SAMPLES,
    Floats,
    LabeledScores,
    PairingGain,
    dot,
    of_classes,
    of_labels,
    of_squares,
    root_mean_square,
    targets_of_squares,
)
from gradwatch.probe.batches.output_range import (
    OutputRange,
    last_operation,
    name_of_activation,
    range_of,
    unreachable_share,
)
from gradwatch.probe.batches.predicted_classes import PredictedClasses
from gradwatch.probe.batches.sample_contrast import SampleContrast
from gradwatch.probe.batches.target_fit import FitState
from gradwatch.probe.device.sync import Arrival, can_be_read
from gradwatch.probe.graph.graph import LINEAR, operation
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values, tensors_of
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.probe.parameters import Models

MAX_CALLS = 8
"""Maximum number of forward calls of a step: with more, the loop runs over something other than samples."""

MAX_OUTPUTS = 4
"""Maximum number of outputs of one call: the prediction, and the state of a recurrent layer."""

MAX_VALUES = 65536
"""Maximum number of values to read of one call: of the leading samples, and if 8 samples have more, of some positions
in each."""

MIN_UNREACHABLE = 0.01
"""Minimum fraction of the variance of targets that is out of the range of an output."""

LARGE_OUTPUTS = 10.0
"""Size of the first outputs, in units of their targets, from which it is recorded."""

ROUNDING_ERRORS = 100
"""Size of targets in rounding errors of the outputs up to which they may be 0."""


class OutputSlice(NamedTuple):
    """The part of an output that is read.

    Args:
        dims: Dimensions that may hold the classes; each is read completely.
        slices: Index of the part in the output.
    """

    dims: tuple[int, ...]
    slices: tuple[slice, ...]


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


class CallValues(NamedTuple):
    """The values of an `OutputCall`, on the host."""

    size: int
    slices: list[OutputSlice]
    scores: list[Floats]
    gradients: list[Floats]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each part, without the number of samples."""
        return [tuple(scores.shape[1:]) for scores in self.scores]


class LastOperation(NamedTuple):
    """The last operation of an output.

    Args:
        limits: Range of an activation, or None.
        is_linear: Whether it belongs to a linear layer.
    """

    limits: OutputRange | None
    is_linear: bool


class StepRead(NamedTuple):
    """The values that were read in one step.

    Args:
        calls: The forward calls.
        made_by: Last operation of their output.
        arrival: Brings the scores and the gradients of each call to the host, and the loss if it is a tensor.
        loss: The loss if it is a number; nan if it is a tensor or unknown.
    """

    calls: list[OutputCall]
    made_by: LastOperation
    arrival: Arrival
    loss: float

    @classmethod
    def send(cls, calls: list[OutputCall], made_by: LastOperation, loss: Any) -> StepRead:
        """Send the values of a step to the host."""
        values = [tensor for call in calls for tensor in (*call.scores, *call.gradients)]
        values += [loss.detach()] if isinstance(loss, Tensor) and loss.numel() == 1 else []
        return cls(calls, made_by, Arrival(values), float(loss) if isinstance(loss, (float, int)) else math.nan)

    def arrived(self) -> tuple[list[CallValues], float]:
        """Return the values of the calls, and the loss."""
        values, calls = (array.astype(np.float64) for array in self.arrival.values()), []
        for call in self.calls:
            scores, gradients = ([next(values) for _ in call.slices] for _ in range(2))
            calls.append(CallValues(call.size, call.slices, scores, gradients))
        return calls, next((float(loss.flat[0]) for loss in values), self.loss)


@final
class TargetMatch:
    """Read predictions and their gradients, which reveal the targets, on steps that sample activations.

    The gradient of a cross entropy is the prediction minus the label, and of a squared error a multiple of their
    difference. So the probe knows the targets without asking for them. If a model has learned only the mean of the
    targets, a prediction fits any other sample as well as its own. Losses of another form are ignored. The values of a
    GPU are judged at a later sampled step, when they have arrived.

    Args:
        models: A model, or several by name.
    """

    part: ClassVar[str] = "the match of outputs and targets"

    def __init__(self, models: Models) -> None:
        self._models = models
        self._handles: list[RemovableHandle] = []
        self._read: dict[int, list[OutputCall]] = {}  # by index of the output
        self._made_by: dict[int, LastOperation] = {}
        self._calls = 0
        self._sent: deque[StepRead] = deque()
        self._fit, self._contrast, self._classes = FitState(), SampleContrast(), PredictedClasses()
        self._activation: str | None = None  # its name, once a range is known
        self._beyond = 0.0  # share of the targets of the last read that are out of range
        self._is_range_reported = False
        self._is_first = True  # until the outputs of a step have been read

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is read."""
        return self._fit.is_over and self._contrast.is_over and self._classes.is_over

    def clear(self) -> None:
        """Drop the data and the hooks of the previous step."""
        remove_hooks(self._handles)
        self._read, self._made_by, self._calls = {}, {}, 0

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        parts = {"contrast": self._contrast.state(), "classes": self._classes.state()}
        return {**self._fit.state(), "is_range_told": self._is_range_reported, **parts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._fit.restore(state)
        self._is_first = False
        self._is_range_reported = state.get("is_range_told", False)  # older states have none
        if "contrast" in state:
            self._contrast.restore(state["contrast"])
        if "classes" in state:
            self._classes.restore(state["classes"])

    def watch(self, call: ForwardCall, /) -> None:
        """Hook the outputs of a model, to read their gradients in the next backward pass."""
        found = list({id(t): t for t in tensors_of(call.output) if t.requires_grad and t.is_floating_point()}.values())
        self._calls += 1
        if not 0 < len(found) <= MAX_OUTPUTS or self.is_over or self._calls > MAX_CALLS:
            return
        for i, scores in enumerate(found):
            if can_be_read(scores) and scores.ndim and len(scores) >= MIN_SAMPLES:
                self._made_by[i] = self._maker_of(scores)
                read = self._read.setdefault(i, [])
                self._handles.append(scores.register_hook(inert_hook(_OutputHook(read, scores.detach()))))

    def find(self, loss: Any = None, /) -> Iterator[Observation]:
        """Yield an observation, after a backward pass, if predictions no longer fit their targets, or fit again.

        Args:
            loss: Loss of the step, as the loop passed it.
        """
        if not self._calls:  # not a sampled step
            return
        # a call without a gradient does not belong to the loss, and neither does a state that a model returns; of
        # several outputs with a gradient, any may be the prediction
        used = [i for i, read in self._read.items() if read]
        read = self._read[used[0]] if len(used) == 1 else []
        if 0 < len(read) == self._calls <= MAX_CALLS:
            self._sent.append(StepRead.send(read, self._made_by[used[0]], loss))
        else:
            self._classes.add(None)
            if not self._fit.is_over:
                self._fit.add(None)
        self.clear()
        # the first values are waited for: the start of a run is judged soon
        while self._sent and (self._is_first or self._sent[0].arrival.is_ready):
            yield from self._judge(self._sent.popleft())

    def _judge(self, step: StepRead) -> list[Observation]:
        """Return what the values of a step show."""
        read, loss = step.arrived()
        # scores that are not probabilities overflow
        with np.errstate(all="ignore"):
            labeled = _labeled_scores(read)
            gain = labeled.gain() if labeled else _gain_of_squares(read, loss)
            found = [*self._judge_first(read, step, loss)] if self._is_first and len(read) == 1 else []
            found += [*self._judge_single(read, step.made_by, loss)] if len(read) == 1 else []
        self._is_first = False
        found += filter(None, [self._classes.add(labeled)])
        observation = None if self._fit.is_over else self._fit.add(gain)
        return found if observation is None else [*found, observation]

    def _maker_of(self, scores: Tensor) -> LastOperation:
        last, limits = last_operation(scores), range_of(scores)
        if limits is not None and self._activation is None and not self._is_range_reported:
            self._activation = name_of_activation(scores, self._models)
        return LastOperation(limits, last is not None and operation(last) in LINEAR)

    def _judge_first(self, read: list[CallValues], step: StepRead, loss: float) -> Iterator[Observation]:
        """Yield an observation if the outputs of the first step are far larger than the targets of a squared error."""
        scores, gradient = _concatenate(read, 0)
        targets = targets_of_squares(scores, gradient, loss) if read[0].size == scores.size else None
        if targets is None:
            return
        outputs, wanted = root_mean_square(scores), root_mean_square(targets)
        # targets of 0 come out as rounding errors
        rounding = ROUNDING_ERRORS * torch.finfo(step.calls[0].scores[0].dtype).eps
        if rounding * outputs < wanted <= outputs / LARGE_OUTPUTS:
            yield FIRST_OUTPUTS.observe(values={"outputs": outputs, "targets": wanted})

    def _judge_single(self, read: list[CallValues], made_by: LastOperation, loss: float) -> Iterator[Observation]:
        """Yield what the only forward call of a step shows."""
        scores, gradient = _concatenate(read, 0)
        if read[0].size != scores.size:
            return
        if made_by.limits is not None and not self._is_range_reported:
            yield from self._judge_range(targets_of_squares(scores, gradient, loss), made_by.limits)
        if self._contrast.is_over:
            return
        if observation := self._contrast.add(scores, gradient, loss, is_linear=made_by.is_linear):
            yield observation

    def _judge_range(self, targets: Floats | None, limits: OutputRange) -> Iterator[Observation]:
        """Yield an observation if targets of a squared error lie outside of the range of two outputs in a row."""
        before, self._beyond = self._beyond, 0.0 if targets is None else unreachable_share(targets, limits)
        share = min(before, self._beyond)  # one sample far away may be an error in the data
        if targets is None or share < MIN_UNREACHABLE:
            return
        self._is_range_reported = True
        is_below = limits.least - targets.min() > targets.max() - limits.most
        values = {"share": share, "target": targets.min() if is_below else targets.max()}
        yield TARGETS_UNREACHABLE.observe(self._activation, values=values, activation=limits.activation)


@final
class _OutputHook:
    """Hook of an output that keeps its gradient."""

    def __init__(self, read: list[OutputCall], scores: Tensor) -> None:
        self._read = read
        self._slices = slices_of(scores.shape)
        # clones: the loop may change the output in place, and a view would keep all of it
        self._scores = [scores[part.slices].clone() for part in self._slices]

    def __call__(self, gradient: Tensor) -> None:
        if not has_plain_values(gradient):  # of many backward passes at once
            return
        gradients = [gradient.detach()[part.slices].clone() for part in self._slices]
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
    index = [slice(samples), *map(slice, shape[1:])]
    budget = MAX_VALUES // 2 // (samples * shape[whole])  # either dimension has a part
    others = [d for d in range(1, len(shape)) if d != whole]
    for left, d in zip(range(len(others), 0, -1), others, strict=True):
        number = min(shape[d], max(1, int(budget ** (1 / left))))
        every = shape[d] // number
        index[d] = slice(every // 2, every // 2 + every * (number - 1) + 1, every)
        budget //= number  # a short dimension leaves its share to the others
    return tuple(index)


def _labeled_scores(read: list[CallValues]) -> LabeledScores | None:
    """Return all predictions of a step with their labels; None if the loss is not a cross entropy."""
    first = read[0]
    if any(call.shapes != first.shapes for call in read):
        return None
    values = [_concatenate(read, i) for i in range(len(first.slices))]
    scores, gradient = values[0]
    if not dot(gradient, gradient) > 0:  # all zero, or NaN
        return None
    classes = (of_classes(*both, d) for both, part in zip(values, first.slices, strict=True) for d in part.dims)
    return next(filter(None, classes), None) or of_labels(scores, gradient)


def _gain_of_squares(read: list[CallValues], loss: float) -> PairingGain | None:
    """Return the gain of the predictions of a step; None if the loss is not the squared error of one call."""
    if len(read) > 1:
        return None
    scores, gradient = _concatenate(read, 0)
    return of_squares(scores, gradient, loss) if read[0].size == scores.size else None


def _concatenate(read: list[CallValues], i: int) -> tuple[Floats, Floats]:
    """Return scores and gradients of one part of all calls, with at least one dimension after the samples."""
    scores, gradient = (
        np.concatenate(part) for part in ([it.scores[i] for it in read], [it.gradients[i] for it in read])
    )
    return (scores[:, None], gradient[:, None]) if scores.ndim == 1 else (scores, gradient)
