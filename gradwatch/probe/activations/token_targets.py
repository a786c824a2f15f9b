"""Compare the labels of a language model with its input tokens: how far ahead and whether visible to the model."""

# B = sequences, T = positions, L = labels of a sequence, V = vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import SEQUENCE_AXIS, TARGETS_AHEAD, TARGETS_COPIED, TARGETS_VISIBLE, Observation
from gradwatch.probe.activations.attention import queries_and_keys, sees_next_position
from gradwatch.probe.device.sync import can_be_read, host_tensor
from gradwatch.probe.graph.graph import FUSED_ATTENTIONS, SOFTMAX, Graph, Node, operation
from gradwatch.probe.graph.sequence_axis import layer_along_batch
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.probe.parameters import Models, module_names, named_modules

MAX_READS = 4
"""Sampled steps to read: labels and masks of a loop have the same form at each step, and most models have no tokens."""

MIN_LABELS = 64
"""Minimum number of labels to compare with tokens: if there are two tokens, chance matches all once in 1e19 times."""

MIN_MATCHES = 0.98
"""Minimum fraction of labels that equal a token, so that a few may differ at the ends of documents."""

SHIFTS = (0, 1, 2, 3)
"""Positions that a label may be ahead. A text that repeats itself matches several of them, which proves nothing."""

MAX_VALUES = 1 << 22
"""Maximum number of values of a gradient to read, of the leading sequences."""

MAX_ATTENTIONS = 4
"""Maximum number of attentions to read, the nearest to the inputs: what one sees, all later ones may use."""


BY_POSITION = frozenset(
    {
        "Add",
        "Addmm",
        "Clone",
        "Contiguous",
        "Div",
        "Gelu",
        "LogSoftmax",
        "Mm",
        "Mul",
        "NativeDropout",
        "NativeLayerNorm",
        "Permute",
        "Relu",
        "ReshapeAlias",
        "Silu",
        "Sub",
        "Tanh",
        "ToCopy",
        "Transpose",
        "UnsafeView",
        "View",
    }
)
"""Operations that do not mix positions, as in the residual stream of a transformer and its head."""


class Lookup(NamedTuple):
    """Tokens that a model looked up.

    Args:
        tokens_BT: The tokens.
        layer: Name of the layer through which a position sees the token after it, or None.
        table: Name of the embedding, or None.
        has_own_path: Whether each position gets its own token by operations on single positions.
        along_batch: Name of a layer that takes the sequences for the positions, or None.
    """

    tokens_BT: Tensor
    layer: str | None
    table: str | None
    has_own_path: bool
    along_batch: str | None


class Shift(NamedTuple):
    """Labels that are tokens.

    Args:
        positions: Positions that each label is ahead of its token.
        labels: Number of labels that were compared.
    """

    positions: int
    labels: int


@final
class TokenTargets:
    """Read the tokens that a model looks up and the labels of its loss, at the first sampled steps.

    If a model computes its loss, its graph contains the labels. Otherwise the gradient of its scores shows them: only
    the entry of the label is negative. Each of the few reads waits for a GPU.

    Args:
        models: A model, or several by name.

    Attributes:
        is_over: Whether nothing more is read.
    """

    part: ClassVar[str] = "the labels of tokens"

    def __init__(self, models: Models) -> None:
        self._modules = module_names(models)
        recurrences = [(name, module) for name, module in named_modules(models) if isinstance(module, nn.RNNBase)]
        self._bidirectional = [(name, module.input_size) for name, module in recurrences if module.bidirectional]
        self._handles: list[RemovableHandle] = []
        self._lookups: list[Lookup] = []
        self._labels: list[Tensor] = []
        self._reads, self._has_output = 0, False
        self.is_over = False

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        remove_hooks(self._handles)
        self._lookups, self._labels = [], []
        self._has_output = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        return {"reads": self._reads, "is_over": self.is_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._reads, self.is_over = state["reads"], state["is_over"]

    def watch(self, call: ForwardCall, /) -> None:
        """Read the tokens below the output of a model, and the labels, now or in the next backward pass."""
        self._has_output = True
        if self.is_over or not call.roots or not all(map(can_be_read, call.roots)):
            return
        graph = call.graph
        lookups = [*self._find_lookups(call)]
        if not lookups:
            return
        self._lookups += lookups
        likelihoods = graph.of("NllLoss", "NllLoss2D")
        for node in likelihoods:
            labels = call.saved(node, "target")
            self._labels += [host_tensor(labels)] if labels is not None else []
        if not likelihoods:
            hook = inert_hook(partial(self._read_labels, positions=lookups[0].tokens_BT.shape[1]))
            self._handles += [scores.register_hook(hook) for scores in call.roots if scores.ndim > 1]

    def find(self, _loss: Any = None, /) -> Iterator[Observation]:
        """Yield an observation, after a backward pass, if labels are visible or too far ahead, or axes mixed."""
        lookups, all_labels = self._lookups, self._labels
        self._reads += self._has_output
        self.is_over |= self._reads >= MAX_READS
        self.clear()
        pairs = [(lookup, shift_of(labels, lookup.tokens_BT)) for lookup in lookups for labels in all_labels]
        shifts = {shift.positions: shift for _, shift in pairs if shift}
        layers = [lookup.layer for lookup, shift in pairs if shift and shift.positions == 1 and lookup.layer]
        # several heads may predict several tokens
        if layers and len(shifts) == 1:
            self.is_over = True
            yield TARGETS_VISIBLE.observe(layers[0], values={"labels": shifts[1].labels})
        elif shifts and min(shifts) > 1:
            self.is_over = True
            ahead = shifts[min(shifts)]
            yield TARGETS_AHEAD.observe(values={"ahead": ahead.positions, "labels": ahead.labels})
        elif shifts.keys() == {1} and (mixed := [lookup for lookup, shift in pairs if shift and lookup.along_batch]):
            self.is_over = True
            rows, samples = mixed[0].tokens_BT.shape
            yield SEQUENCE_AXIS.observe(mixed[0].along_batch, values={"rows": rows, "samples": samples})
        elif shifts.keys() == {0} and (own := self._copied(pairs)):
            self.is_over = True
            yield TARGETS_COPIED.observe(own.table, values={"labels": shifts[0].labels})

    def _copied(self, pairs: list[tuple[Lookup, Shift | None]]) -> Lookup | None:
        """Return tokens that can be copied to the labels in their places, or None.

        An autoencoder has such labels, but no way around its code. A decoder must not get them in addition to other
        tokens.
        """
        own = [lookup for lookup, shift in pairs if shift]
        others = [lookup for lookup, shift in pairs if not shift]
        return next((lookup for lookup in own if lookup.has_own_path or others), None)

    def _find_lookups(self, call: ForwardCall) -> Iterator[Lookup]:
        graph = call.graph
        for node in graph.of("Embedding"):
            saved = call.saved(node, "indices")
            tokens = None if saved is None else host_tensor(saved)
            # a lookup of positions is the same in all sequences
            if tokens is not None and tokens.ndim == 2 and not bool((tokens == tokens[:1]).all()):
                yield Lookup(
                    tokens,
                    self._layer_that_sees_next(call, node, positions=tokens.shape[1]),
                    self._modules.get(graph.parameter(node)),
                    _has_own_path(graph, node),
                    self._layer_along_batch(graph, tokens),
                )

    def _layer_along_batch(self, graph: Graph, tokens_BT: Tensor) -> str | None:
        """Return the layer that takes the sequences for the positions, or None."""
        sequences, positions = tokens_BT.shape
        node = layer_along_batch(graph, samples=sequences, steps=positions)
        return None if node is None else self._modules.get(graph.parameter(node))

    def _layer_that_sees_next(self, call: ForwardCall, lookup: Node, *, positions: int) -> str | None:
        """Return the layer through which a position sees the token after it, or None."""
        graph = call.graph
        table = graph.parameter(lookup)
        for name, width in self._bidirectional:
            if table is not None and width == table.shape[-1]:
                return name
        for node in reversed(graph.of(*FUSED_ATTENTIONS, *SOFTMAX)[-MAX_ATTENTIONS:]):
            operands = queries_and_keys(node, call.saved)
            # the keys of a decoder may come from an encoder, which sees other tokens
            if operands is None or not all(lookup in set(graph.below(operand)) for operand in operands):
                continue
            if sees_next_position(node, call.saved, positions=positions):
                return self._modules.get(graph.parameter(operands[1]))
        return None

    def _read_labels(self, gradient: Tensor, *, positions: int) -> None:
        if not has_plain_values(gradient):
            return
        scores = gradient.detach()
        # one row for each position of each sequence
        if scores.ndim == 2 and len(scores) % positions == 0:
            scores = scores.unflatten(0, (-1, positions))
        scores = host_tensor(scores[: max(1, MAX_VALUES // max(1, scores[0].numel()))])
        for dim in dict.fromkeys((scores.ndim - 1, 1)):
            counts = scores.any(dim)
            if counts.any() and bool(((scores < 0).sum(dim)[counts] == 1).all()):
                self._labels.append(scores.argmin(dim).where(counts, -1))
                return


def _has_own_path(graph: Graph, lookup: Node) -> bool:
    """Return whether an output depends on a lookup by operations that keep each position apart."""
    waiting, seen = graph.users(lookup), {lookup}
    outputs = set(graph.outputs)
    while waiting:
        node = waiting.pop()
        if node in seen or operation(node) not in BY_POSITION:
            continue
        if node in outputs:
            return True
        seen.add(node)
        waiting += graph.users(node)
    return False


def shift_of(labels: Tensor, tokens_BT: Tensor) -> Shift | None:
    """Return how far the labels are ahead of the tokens, or None if they are other tokens.

    Args:
        labels: Labels in the order of the tokens, of any shape; negative where a position has none. The last positions
            may be left out.
        tokens_BT: The tokens.
    """
    sequences, positions = tokens_BT.shape
    rows = len(labels) if labels.ndim > 1 else sequences
    if rows > sequences or labels.numel() % rows:
        return None
    labels_BL, tokens_BT = labels.reshape(rows, -1), tokens_BT[:rows]
    if labels_BL.shape[1] > positions:
        return None
    matching = [shift for positions in SHIFTS if (shift := _match(labels_BL, tokens_BT, positions))]
    return matching[0] if len(matching) == 1 else None


def _match(labels_BL: Tensor, tokens_BT: Tensor, positions: int) -> Shift | None:
    """Return a shift by some positions if it holds."""
    size = min(labels_BL.shape[1], tokens_BT.shape[1] - positions)
    labels_BL, tokens_BL = labels_BL[:, :size], tokens_BT[:, positions : positions + size]
    is_equal = (labels_BL == tokens_BL)[labels_BL >= 0]
    number = is_equal.numel()
    return Shift(positions, number) if number >= MIN_LABELS and is_equal.float().mean() >= MIN_MATCHES else None
