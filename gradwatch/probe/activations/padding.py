"""Detect that a model reads the padding of its sequences, from gradients at the tokens and masks of attention."""

# B = sequences, T = positions, D = width of an embedding, Q = queries, K = keys

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import PADDED_INPUT, PADDING_ATTENDED, PADDING_READ, Observation
from gradwatch.probe.activations.attention import queries_and_keys, used_keys
from gradwatch.probe.device.sync import HostTransfer
from gradwatch.probe.graph.graph import FUSED_ATTENTIONS, SOFTMAX, Graph, Node
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values, tensors_of
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.probe.parameters import Models, module_names, named_modules

MAX_STEPS = 4
"""Sampled steps to read: a loop pads its batches in the same way at each step."""

MAX_ATTENTIONS = 4
"""Maximum number of attentions to read, the nearest to the inputs: all layers of a model get the same mask."""

MIN_PADDING = 0.1
"""Minimum fraction of the positions that are padding. Sequences that end alike by chance have less."""

MAX_ELSEWHERE = 0.01
"""Maximum fraction of the other tokens that are the padding token: the background of an image is not padding."""

MIN_SHARE = 0.9
"""Minimum fraction of the squared gradient that is at padding. A mean over all positions has the fraction of padding,
and a model that learns has less and less."""

MIN_DECADES = 0.5
"""Minimum ratio of the mean gradient of a padding token to that of another token, in powers of ten."""

SMALLEST = 1e-45
"""Lower bound of the squared gradient of a token, relative to the largest of a batch: avoids a division by 0."""

OPPOSITE_FRAC = 0.98
"""Minimum fraction of the padding that an attention uses, and of the tokens that it does not use, for a mask to count
as inverted."""


class Subject(Enum):
    """What a read is about."""

    GRADIENT = auto()
    """Squared gradients at padding and at tokens."""

    MASK = auto()
    """Padding and tokens that an attention uses."""

    INPUT = auto()
    """Mean square of the numbers that a recurrent layer gets, at padding and elsewhere."""


class Read(NamedTuple):
    """The subject of one measurement.

    Args:
        subject: Meaning of the last two numbers.
        layer: Name of the layer, or None.
        positions: Number of positions of a sequence.
    """

    subject: Subject
    layer: str | None
    positions: int


@final
class PaddingReader:
    """Measure the gradients at padding and at tokens, and the masks of attention, at the first sampled steps.

    Padding is a token that fills the ends of sequences of different lengths, and is rare elsewhere. Sums of squared
    gradients and counts are computed on the device of the model, and arrive later: a later call of `find` returns them.

    Args:
        models: A model, or several by name.

    Attributes:
        is_over: Whether nothing more is read.
    """

    part: ClassVar[str] = "the padding"

    def __init__(self, models: Models) -> None:
        self._modules = module_names(models)
        self._recurrences = [(name, it.input_size) for name, it in named_modules(models) if isinstance(it, nn.RNNBase)]
        self._handles: list[RemovableHandle] = []
        self._reads: list[Read] = []
        self._measured: list[Tensor] = []
        self._transfer: HostTransfer | None = None
        self._in_flight = self._reads
        self._has_read, self._steps = False, 0
        self.is_over = False

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        remove_hooks(self._handles)
        self._reads, self._measured, self._has_read = [], [], False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back; it does not wait for measurements in flight."""
        return {"steps": self._steps, "is_over": self.is_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._steps, self.is_over = state["steps"], state["is_over"]

    def watch(self, call: ForwardCall, /) -> None:
        """Measure the inputs of a model, and in the next backward pass the tokens that it looks up."""
        if self.is_over or self._transfer or not call.roots:
            return
        self._has_read = True
        for values in tensors_of(call.inputs):
            self._measure_inputs(values)
        graph = call.graph
        for node in graph.of("Embedding"):
            tokens = call.saved(node, "indices")
            if tokens is not None and tokens.ndim == 2 and min(tokens.shape) > 1:
                hook = inert_hook(partial(self._measure_gradient, tokens, self._reader_of(graph, node)))
                self._handles.append(node.register_prehook(hook))
                self._measure_attentions(call, node, tokens)

    def find(self, _loss: Any = None, /) -> Iterator[Observation]:
        """Yield an observation, after a backward pass, if the model reads padding instead of tokens."""
        if self._has_read:
            self._steps += 1
            if len({read.device for read in self._measured}) == 1:
                self._transfer = HostTransfer({"measured": torch.stack(self._measured)})
                self._in_flight = self._reads
            self.clear()
        if self._transfer is not None and self._transfer.is_ready:
            rows, self._transfer = self._transfer.values()["measured"], None
            found = next(filter(None, map(_judge, self._in_flight, rows)), None)
            if found is not None:
                self.is_over = True
                yield found
        self.is_over |= self._steps >= MAX_STEPS and self._transfer is None

    def _reader_of(self, graph: Graph, lookup: Node) -> str | None:
        """Return the only recurrent layer that fits an embedding, or the embedding."""
        table = graph.parameter(lookup)
        if table is None:
            return None
        fitting = [name for name, width in self._recurrences if width == table.shape[-1]]
        return fitting[0] if len(fitting) == 1 else self._modules.get(table)

    def _measure_gradient(self, tokens_BT: Tensor, layer: str | None, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0] if gradients else None
        if gradient is None or not has_plain_values(gradient) or gradient.shape[:2] != tokens_BT.shape:
            return
        size_BTD = gradient.detach().abs().float()
        # relative to the largest, since squares of small numbers are zero
        energy_BT = (size_BTD / size_BTD.amax()).square().sum(-1)
        for axis in (1, 0):  # sequences may be rows or columns
            is_padding, counts = _padding(_ends(tokens_BT, axis), axis)
            sums = torch.stack([(energy_BT * is_padding).sum(), (energy_BT * ~is_padding).sum()])
            self._add(Read(Subject.GRADIENT, layer, tokens_BT.shape[axis]), counts, sums)

    def _measure_inputs(self, values: Tensor) -> None:
        """Measure numbers that a recurrent layer gets from outside, whose gradient is not computed."""
        fitting = [name for name, width in self._recurrences if values.ndim == 3 and width == values.shape[-1]]
        if len(fitting) != 1 or not values.is_floating_point() or min(values.shape[:2]) < 2:
            return
        squares_BT = values.detach().float().square().mean(-1)
        for axis in (1, 0):
            is_padding, counts = _padding(squares_BT == 0, axis)
            sums = torch.stack([(squares_BT * is_padding).sum(), (squares_BT * ~is_padding).sum()])
            self._add(Read(Subject.INPUT, fitting[0], values.shape[axis]), counts, sums)

    def _measure_attentions(self, call: ForwardCall, lookup: Node, tokens_BT: Tensor) -> None:
        graph = call.graph
        for node in reversed(graph.of(*FUSED_ATTENTIONS, *SOFTMAX)[-MAX_ATTENTIONS:]):
            operands = queries_and_keys(node, call.saved)
            is_used = used_keys(node, call.saved) if operands else None
            # the keys of a decoder may come from an encoder, which sees other tokens
            if operands is None or is_used is None or lookup not in set(graph.below(operands[1])):
                continue
            sequences, keys = tokens_BT.shape
            if is_used.shape[-1] != keys or is_used[..., 0, 0].numel() % sequences:
                continue
            is_used_BK = is_used.reshape(sequences, -1, keys).any(1)
            is_padding_BK, counts = _padding(_ends(tokens_BT, 1), 1)
            used = torch.stack([(is_used_BK & is_padding_BK).sum(), (is_used_BK & ~is_padding_BK).sum()])
            self._add(Read(Subject.MASK, self._modules.get(graph.parameter(operands[1])), keys), counts, used)

    def _add(self, read: Read, counts: Tensor, sums: Tensor) -> None:
        self._reads.append(read)
        self._measured.append(torch.cat([counts, sums]))


def _ends(tokens_BT: Tensor, axis: int) -> Tensor:
    """Return which tokens equal the last token of most sequences, along the axis of the positions."""
    token = tokens_BT.select(axis, -1).mode().values  # most sequences are shorter than the longest
    return tokens_BT == token


def _padding(may_be_BT: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return which positions at the end of a sequence are padding, and the counts to judge it by.

    Args:
        may_be_BT: Whether each position may be padding.
        axis: Axis of the positions.

    Returns:
        Whether each position is padding, and a float32 tensor of shape (5,): the number of positions, of padding, and
        of possible padding elsewhere, and the least and the most padding of a sequence.
    """
    is_padding = may_be_BT.flip(axis).cumprod(axis).flip(axis).bool()
    lengths = is_padding.sum(axis)
    number = torch.full_like(lengths[0], may_be_BT.numel())
    elsewhere = may_be_BT.sum() - is_padding.sum()
    counts = torch.stack([number, is_padding.sum(), elsewhere, lengths.amin(), lengths.amax()])
    return is_padding, counts.float()


def _judge(read: Read, row: NDArray[Any]) -> Observation | None:
    """Return the observation of one read, or None."""
    number, padding, elsewhere, shortest, longest, of_padding, of_tokens = map(float, row)
    tokens = number - padding
    # along the wrong axis, the columns after the longest sequence are all padding
    are_sequences = shortest < longest < read.positions
    if not are_sequences or padding < MIN_PADDING * number or elsewhere > MAX_ELSEWHERE * tokens:
        return None
    if read.subject is Subject.INPUT:
        values = {"padding": padding / number, "rms": math.sqrt(of_tokens / tokens)}
        return PADDED_INPUT.observe(read.layer, values=values)
    if read.subject is Subject.MASK:
        is_opposite = of_padding >= OPPOSITE_FRAC * padding and of_tokens <= (1 - OPPOSITE_FRAC) * tokens
        return PADDING_ATTENDED.observe(read.layer, values={"padding": padding / number}) if is_opposite else None
    if not of_padding >= MIN_SHARE * (of_padding + of_tokens) > 0:
        return None
    decades = 0.5 * math.log10(of_padding / padding / max(of_tokens / tokens, SMALLEST))
    if decades < MIN_DECADES:
        return None
    return PADDING_READ.observe(read.layer, values={"padding": padding / number, "decades": decades})
