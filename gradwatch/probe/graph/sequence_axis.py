"""Find sequence layers that mistake the samples of a batch for the steps of a sequence.

Recurrent layers and attention of torch expect (steps, samples, features), unless they get `batch_first=True`. Given
(samples, steps, features), they mix the samples of a batch, and nothing raises an error. The loss then has one row for
each supposed step of the layer, not for each supposed sample.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from torch.utils.data import DataLoader, default_collate

from gradwatch.events import SEQUENCE_AXIS
from gradwatch.probe.graph.graph import FUSED_ATTENTIONS, SOFTMAX, Graph, Node, operation, shape
from gradwatch.probe.graph.loss_rules import GraphMatch
from gradwatch.probe.objects import live

GPU_RECURRENCES = ("CudnnRnn", "MiopenRnn")

FUSED_RECURRENCES = (*GPU_RECURRENCES, "MkldnnRnnLayer")
"""Recurrent layers that are one operation, with results of shape (steps, samples, units).

Those of a GPU keep the shape of the layer, which is (samples, steps, units) with `batch_first=True`. The others are
transposed before and after.
"""

ROW_LOSSES = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "MseLoss", "NllLoss", "SmoothL1Loss")
"""Losses whose first argument has one row for each sample."""


class SequenceSizes(NamedTuple):
    """Sizes of a batch of sequences, as a layer takes them.

    Args:
        node: Operation of the layer.
        steps: Steps of each sequence, which the layer mixes.
        samples: Number of sequences.
    """

    node: Node
    steps: int
    samples: int


def match_sequence_axis(graph: Graph, node: Node) -> GraphMatch | None:
    """Match a loss with one row for each step of a layer of sequences, and none for its samples.

    If the loss has a row for each step of each sample, the size of the batches of a DataLoader tells them apart.

    Args:
        graph: Autograd graph of a loss.
        node: One of `ROW_LOSSES`.
    """
    predictions = graph.first(node)
    sizes = shape(predictions) if predictions is not None else ()
    if not sizes or predictions is None:
        return None
    rows, *others = sizes
    for layer, steps, samples in _layers(graph, set(graph.below(predictions))):
        if 1 in (steps, samples) or steps == samples:
            continue
        # a row for each step of each sample is right in either order, unless a batch has as many samples as steps
        has_all = rows == steps * samples or (rows == steps and samples in others)
        if not (_are_samples(steps, other=samples) if has_all else rows == steps):
            continue
        # several views of each sample in one batch, which by chance has as many samples as steps
        if operation(layer) in (*FUSED_ATTENTIONS, *SOFTMAX) and samples % rows == 0:
            continue
        if operation(layer) != "Stack" or _is_recurrence(graph, layer):
            return GraphMatch(layer, SEQUENCE_AXIS.observe(values={"rows": steps, "samples": samples}))
    return None


def _are_samples(size: int, *, other: int) -> bool:
    """Return whether a DataLoader yields batches of a size, with the samples first, and none yields the other size."""
    sizes = {loader.batch_size for loader in live(DataLoader) if loader.collate_fn is default_collate}
    return size in sizes and other not in sizes


def layer_along_batch(graph: Graph, *, samples: int, steps: int) -> Node | None:
    """Return a layer of sequences that takes the samples for the steps, or None.

    Args:
        graph: Autograd graph of the outputs of a model.
        samples: Number of sequences of a batch.
        steps: Number of steps of each.
    """
    if 1 in (samples, steps) or samples == steps:
        return None
    layers = (it.node for it in _layers(graph, set(graph.nodes)) if (it.steps, it.samples) == (samples, steps))
    return next((node for node in layers if operation(node) != "Stack" or _is_recurrence(graph, node)), None)


def _layers(graph: Graph, below: Container[Node]) -> Iterator[SequenceSizes]:
    """Yield the layers of sequences among some nodes."""
    for node in graph.of(*FUSED_RECURRENCES, "Stack"):
        if node in below and len(shape(node)) == 3:
            steps, samples, _ = shape(node)
            if getattr(node, "_saved_batch_first", False) and operation(node) in GPU_RECURRENCES:
                steps, samples = samples, steps
            yield SequenceSizes(node, steps, samples)
    for node in graph.of(*FUSED_ATTENTIONS, *SOFTMAX):
        if node in below and len(shape(node)) == 4:
            samples, _, steps, keys = shape(node)
            if operation(node) in FUSED_ATTENTIONS or steps == keys:
                yield SequenceSizes(node, steps, samples)


def _is_recurrence(graph: Graph, stack: Node) -> bool:
    """Return whether the last of some stacked values follows from the first, as the states of a recurrence do."""
    values = graph.inputs(stack)
    first, last = (graph.through(value) for value in (values[0], values[-1])) if len(values) > 1 else (None, None)
    return first is not None and last is not None and first is not last and first in set(graph.below(last))
