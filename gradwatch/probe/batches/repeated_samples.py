"""Detect that the first batches of a run consist of the same samples, possibly shuffled or with noise."""

# N = samples of a batch

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.events import BATCH_ALIKE, PART_BATCH, Observation
from gradwatch.probe.batches.batch_hash import hash_batch, tensors
from gradwatch.probe.batches.origin import MAX_COORDINATES, BatchOrigin
from gradwatch.probe.device.sync import to_float
from gradwatch.records import Event

INSPECTED_STEPS = (0, 1, 8, 10, 20, 30)
"""Steps to inspect, as long as all are alike: unshuffled epochs of two batches or more differ at the second."""

SURE_STEP = 10
"""First step to report equal batches that are allocated each time: no loop repeats one batch for so long."""

MIN_SAMPLES, MAX_SAMPLES = 4, 256
"""Limits of the samples in an inspected batch: fewer have no neighbors, and more may be the whole data set."""

MAX_FEATURES = 1024
"""Maximum number of values to read of a sample, spread evenly over the sample."""

MIN_COPIES = 4
"""Minimum average number of copies of each sample in a batch that is drawn from a few samples."""

MAX_DISTANCE = 0.3
"""Maximum distance from the samples of a batch to the samples of the first batch, if both have the same samples.

For one sample, it is the distance to the nearest sample of the first batch, relative to that sample's distance to its
own neighbor. The median over the samples counts. It is 1 for other samples of the same kind, 0 for the same samples,
and in between with noise.
"""

MIN_NEW_DISTANCE = 0.5
"""Minimum distance of a new sample among exact copies of others: the samples come from a pool that grows.

A replay buffer begins with little more than one batch, so most samples of the next batches are copies.
"""

TOKEN_FACTOR = 0.6
"""Factor of the distance between sequences of tokens, which is the number of tokens that differ.

If 1/7 of the tokens are masked at random each time, 1/4 of them differ, and half of the samples are nearer than that.
"""


@final
class RepeatedSamples:
    """Keep the first batch of a run, as long as the following batches consist of the same samples.

    Attributes:
        is_over: Whether no further batch is needed.
        has_no_rows: Whether the first batch has nothing that can be compared.
    """

    def __init__(self) -> None:
        self._first: list[_SampleGroup] = []
        self._is_exact = self._is_held = True
        self._origin = BatchOrigin()
        self._leaf: Callable[[], Tensor | None] = lambda: None
        self._is_part = False
        self.is_over = self.has_no_rows = False

    def inspect(self, batch: Any, *, step: int) -> Iterator[Event]:
        """Yield the origin of a batch that is repeated at step 1, and an event if all batches are alike.

        Args:
            batch: The inputs of the step, any nest of tensors. The first tensor with samples counts, if it is on a CPU.
            step: Optimizer step.
        """
        for found in self._origin.look_again():
            yield self._note(found, step)
        if self.is_over or step not in INSPECTED_STEPS:
            return
        groups = _groups(batch)
        self.has_no_rows = not groups and step == INSPECTED_STEPS[0]
        # over if the form of the batch changes, is unsupported, or the first step was missed
        if len(groups) != len(self._first or groups) or not groups or not (self._first or step == INSPECTED_STEPS[0]):
            self.is_over = True
        elif not self._first:
            self._first = [_SampleGroup(leaves) for leaves in groups]
            self._leaf = weakref.ref(groups[0][0])
        else:
            yield from self._compare(groups, batch, step=step)

    def _compare(self, groups: list[list[Tensor]], batch: Any, *, step: int) -> Iterator[Event]:
        leaves = groups[0]
        self._is_exact = self._is_exact and all(it.equals(now) for it, now in zip(self._first, groups, strict=True))
        self._is_held = self._is_held and self._first[0].is_held(leaves[0])
        is_small = len(leaves[0]) <= MAX_SAMPLES  # pairwise distances take time, and a large batch may be all data
        distance = max(it.distance(now) for it, now in zip(self._first, groups, strict=True)) if is_small else math.inf
        # two batches of equal samples, which no shuffling explains
        are_equal = self._is_exact and _are_equal(batch)
        is_sure = are_equal or (self._is_exact and not self._is_held and step >= SURE_STEP)
        is_near = are_equal or distance <= MAX_DISTANCE
        samples = _count_samples(batch, rows=len(leaves[0]))
        if step == INSPECTED_STEPS[1] and (self._is_exact or is_near):
            is_held = self._is_held and self._is_exact
            # a view that is made at each step may be a part of its tensor
            is_made = leaves[0] is not self._leaf()
            for found in self._origin.look(leaves[0], samples=samples, is_held=is_held, is_made=is_made):
                yield self._note(found, step)
        # samples that differ once end the comparison; the event waits for the last step, or a sure one
        self.is_over = not is_near or step == INSPECTED_STEPS[-1] or is_sure
        if is_near and self.is_over:
            values = {
                "distance": distance,
                "samples": samples,
                "features": leaves[0][0].numel(),
                "exact": self._is_exact,
                "held": self._is_held,
                "integers": not leaves[0].is_floating_point(),
                "equal": are_equal,
                "part": self._is_part,
            }
            yield BATCH_ALIKE.emit(step=step, values=values)

    def _note(self, found: Observation, step: int) -> Event:
        self._is_part |= found.kind == PART_BATCH.name
        return found.at(step)


@final
class _SampleGroup:
    """Recognize the samples of tensors of the first batch, without keeping the tensors alive."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self._hashes = [hash_batch(leaf) for leaf in leaves]
        self._owner = weakref.ref(_owner(leaves[0]))
        self._address = leaves[0].data_ptr()
        self._views = [(rows, _nearest_neighbors(rows)) for rows in _views(leaves)]

    def equals(self, leaves: list[Tensor]) -> bool:
        """Return whether the tensors that identify the samples are bit-identical."""
        return [hash_batch(leaf) for leaf in leaves] == self._hashes

    def is_held(self, leaf: Tensor) -> bool:
        """Return whether a tensor is the first tensor object, or the same view of it."""
        # the address distinguishes views of one tensor
        return self._owner() is _owner(leaf) and leaf.data_ptr() == self._address

    def distance(self, leaves: list[Tensor]) -> float:
        """Return the distance of samples to the nearest of the first batch, by position or by sorted values."""
        if self.equals(leaves):
            return 0.0
        views = _views(leaves)
        if len(views) != len(self._views):
            return math.inf
        return min((_distance(*view) for view in zip(views, self._views, strict=True)), default=math.inf)


def _groups(batch: Any) -> list[list[Tensor]]:
    """Return the tensors of a batch that must all be alike, in groups that identify the samples together.

    The first tensor counts. Its companions join the group if it may hold points of a grid, or one element of a pair.
    All further floating-point tensors of many features count, too: the first may be a graph that all samples share.
    """
    leaves = [*tensors(batch)]
    if any(leaf.layout != torch.strided for leaf in leaves):
        return []  # the samples are in a sparse tensor, and the labels alone may repeat
    # a complex number is two numbers; a view of them still belongs to the tensor of the batch
    leaves = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    found = [leaf for leaf in leaves if leaf.device.type == "cpu"]
    found = [leaf for leaf in found if leaf.ndim > 1 or (leaf.ndim == 1 and not leaf.is_floating_point())]
    if not found or any(not leaf.numel() for leaf in found):
        return []
    first, is_point = found[0], found[0].is_floating_point()
    # coordinates may come as several tensors, and pairs as two vectors of integers
    mates = [leaf for leaf in found[1:] if len(leaf) == len(first) and first[0].numel() <= MAX_COORDINATES]
    mates = [leaf for leaf in mates if is_point or (leaf.ndim == 1 and not leaf.is_floating_point())]
    others = [leaf for leaf in found[1:] if leaf.is_floating_point() and leaf[0].numel() > MAX_COORDINATES]
    return [[first, *mates], *([leaf] for leaf in others if all(leaf is not mate for mate in mates))]


def _are_equal(batch: Any) -> bool:
    """Return whether all samples of a batch are the same. Labels do not count; the edges of a graph do."""
    leaves = [leaf for leaf in tensors(batch) if leaf.ndim > 1]
    return bool(leaves) and all(leaf.is_cpu and len(leaf) > 1 and bool((leaf == leaf[:1]).all()) for leaf in leaves)


def _count_samples(batch: Any, *, rows: int) -> int:
    """Return the number of samples in the rows of the first tensor: offsets show where each graph begins.

    A batch of graphs is one graph with the nodes of all of them. Its offsets rise from 0 to the number of nodes.
    """
    for leaf in tensors(batch):
        if leaf.ndim == 1 and leaf.device.type == "cpu" and not leaf.is_floating_point() and 1 < len(leaf) <= rows:
            sizes = leaf.diff()
            if to_float(leaf[0]) == 0 and to_float(leaf[-1]) == rows and to_float(sizes.min()) > 0:
                return len(sizes)
    return rows


def _views(leaves: list[Tensor]) -> list[Tensor]:
    """Return the samples of a batch as rows of numbers: unchanged, and sorted, which undoes flips and rolls.

    Rows of whole numbers, such as tokens, stay integers: the difference of two tokens has no meaning.
    """
    if not MIN_SAMPLES <= len(leaves[0]) <= MAX_SAMPLES:
        return []
    if _is_row(leaves[0]):
        return []  # the tokens of a sequence are not samples: two sequences may differ only in order
    rows = [leaf.detach().reshape(len(leaf), -1) for leaf in leaves]
    thin = torch.cat([it[:, :: max(1, it.shape[1] // MAX_FEATURES)].float() for it in rows], 1)
    if thin.shape[1] > MAX_COORDINATES and not leaves[0].is_floating_point():
        return [thin.int(), thin.sort(1).values]
    return [thin, thin.sort(1).values] if thin.shape[1] > MAX_COORDINATES else [thin]


def _distance(rows: Tensor, first: tuple[Tensor, Tensor]) -> float:
    """Return the distance of rows to the nearest of the first rows.

    Returns:
        Median over the rows; infinity if some rows are new among copies of the first; 0 or infinity if two of the first
        rows are equal.
    """
    before, between = first
    if rows.shape != before.shape:
        return math.inf
    if not to_float(between.min()) > 0:  # duplicates: the distance would be divided by 0
        return 0.0 if _is_redrawn(rows, before) else math.inf
    near_N, place_N = _pairwise_distances(rows, before).min(1)
    relative_N = near_N / between[place_N]
    if not rows.is_floating_point():
        return to_float(relative_N.median()) * TOKEN_FACTOR
    is_copy_N = (rows == before[place_N]).all(1)
    has_new = is_copy_N.any() & (relative_N[~is_copy_N] > MIN_NEW_DISTANCE).any()
    return math.inf if has_new else to_float(relative_N.median())


def _is_redrawn(rows: Tensor, before: Tensor) -> bool:
    """Return whether rows with duplicates are a permutation of the first ones, or drawn from few of them.

    Whole numbers may be states or tokens, which are few.
    """
    (now, counts), (then, counts_before) = (torch.unique(it, dim=0, return_counts=True) for it in (rows, before))
    if torch.equal(now, then) and torch.equal(counts, counts_before):
        return len(now) > 1
    are_few = MIN_COPIES * len(then) <= len(before) and len(torch.unique(torch.cat([now, then]), dim=0)) == len(then)
    return are_few and not torch.equal(then, then.round())


def _nearest_neighbors(rows: Tensor) -> Tensor:
    # infinity on the diagonal: a sample is not its own neighbor
    return _pairwise_distances(rows, rows).fill_diagonal_(float("inf")).amin(1)


def _pairwise_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the distance between each two rows; for whole numbers, the number of different values."""
    return torch.cdist(rows, others) if rows.is_floating_point() else torch.cdist(rows.float(), others.float(), p=0)


def _is_row(leaf: Tensor) -> bool:
    """Return whether a tensor is one row of a larger tensor, such as `tokens[0]`: a single sample."""
    base = leaf._base if leaf._is_view() else None
    return base is not None and leaf.ndim == 1 < base.ndim and leaf.shape == base.shape[-1:] and leaf.stride(0) == 1


def _owner(tensor: Tensor) -> Tensor:
    """Return the base of a view, or the tensor itself."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor
