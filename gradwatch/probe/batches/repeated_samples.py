"""Tell whether the samples of a run's first batches are the same ones again, moved about or with noise added."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.probe.batches.batch_hash import hash_batch, tensors
from gradwatch.probe.device.sync import to_float
from gradwatch.records import Event

LOOKS = (0, 1, 8, 10, 20, 30)
"""Steps that are looked at, as long as all are alike: unshuffled epochs of any length but one differ at the second."""

SURE = 10
"""Step from which on batches that are equal and made anew each time are told: no loop goes so long over one batch."""

FEWEST, MOST = 4, 256
"""Samples of a batch that is looked at: fewer have no neighbours, more of them may well be all the data."""

FEATURES = 1024
"""Numbers of a sample that are looked at, spread over all of it."""

COORDINATES = 4
"""Numbers of a sample up to which it may be a point in space and time, of a grid that is all there is."""

FEW = 4
"""How often each sample comes in a batch, on average, that is drawn from a few again and again."""

NEAR = 0.3
"""Distance from a sample to the nearest one of the first batch, in units of that one's distance to its own neighbour,
as median over the samples: 1 for samples of the same kind, 0 for the same ones, and in between for noise."""

WORDS = 0.6
"""What such a distance between samples of words, of which those that differ are counted, is taken for: where a seventh
is masked, anew each time, a quarter of them differ, and half are as near as that."""


@final
class Samples:
    """Keeps the first batch of a run, as long as those that follow are made of the same samples.

    Attributes:
        is_over: Whether no further batch is of interest.
    """

    def __init__(self) -> None:
        self._first: list[_Group] = []
        self._is_exact = self._is_held = True
        self.is_over = False

    def look(self, batch: Any, *, step: int) -> Iterator[Event]:
        """Yield that the very tensor of step 0 came again, and that all batches looked at were alike, once that is so.

        Args:
            batch: The step's inputs, any nest of tensors, of which the first with samples counts, if it is on a CPU.
            step: Optimizer step, counted from the beginning of the run.
        """
        if self.is_over or step not in LOOKS:
            return
        groups = _groups(batch)
        if len(groups) != len(self._first or groups) or not groups or not (self._first or step == LOOKS[0]):
            self.is_over = True
        elif not self._first:
            self._first = [_Group(leaves) for leaves in groups]
        else:
            yield from self._compare(groups, step=step)

    def _compare(self, groups: list[list[Tensor]], *, step: int) -> Iterator[Event]:
        leaves = groups[0]
        self._is_exact = self._is_exact and all(it.equals(now) for it, now in zip(self._first, groups, strict=True))
        self._is_held = self._is_held and self._first[0].is_held(leaves[0])
        if step == LOOKS[1] and self._is_exact and self._is_held and _owner(leaves[0]).numel() == leaves[0].numel():
            yield Event(kind="tensor-held", step=step, text="the loop hands over the same tensor again", values={})
        is_small = len(leaves[0]) <= MOST
        distance = max(it.distance(now) for it, now in zip(self._first, groups, strict=True)) if is_small else math.inf
        is_sure = self._is_exact and not self._is_held and step >= SURE
        is_near = distance <= NEAR
        self.is_over = not is_near or step == LOOKS[-1] or is_sure
        if is_near and self.is_over:
            values = {
                "distance": distance,
                "samples": float(len(leaves[0])),
                "features": float(leaves[0][0].numel()),
                "exact": float(self._is_exact),
                "held": float(self._is_held),
                "integers": float(not leaves[0].is_floating_point()),
            }
            text = "the batches looked at are made of the same samples"
            yield Event(kind="batch-alike", step=step, text=text, values=values)


@final
class _Group:
    """Tensors of a run's first batch: what is needed to know their samples again, without keeping them alive."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self._hashes = [hash_batch(leaf) for leaf in leaves]
        self._owner = weakref.ref(_owner(leaves[0]))
        self._address = leaves[0].data_ptr()
        self._views = [(rows, _between(rows)) for rows in _views(leaves)]

    def equals(self, leaves: list[Tensor]) -> bool:
        """Say whether the tensors that tell samples from each other are the same, bit for bit."""
        return [hash_batch(leaf) for leaf in leaves] == self._hashes

    def is_held(self, leaf: Tensor) -> bool:
        """Say whether a tensor is the very one that was there first, or the same view of it."""
        return self._owner() is _owner(leaf) and leaf.data_ptr() == self._address

    def distance(self, leaves: list[Tensor]) -> float:
        """Return how far samples are from the nearest of the first batch, as they are or by the numbers in them."""
        if self.equals(leaves):
            return 0.0
        views = _views(leaves)
        if len(views) != len(self._views):
            return math.inf
        return min((_distance(*view) for view in zip(views, self._views, strict=True)), default=math.inf)


def _groups(batch: Any) -> list[list[Tensor]]:
    """Return the tensors of a batch that have to be alike, those together that tell its samples from each other.

    The first counts, with those that belong to it where it may be of a grid, or one of a pair; and all further numbers
    of many features, since the first may be a graph that is the same for all samples.
    """
    found = [leaf for leaf in tensors(batch) if leaf.device.type == "cpu" and leaf.layout == torch.strided]
    found = [leaf for leaf in found if leaf.ndim > 1 or (leaf.ndim == 1 and not leaf.is_floating_point())]
    if not found or any(leaf.is_complex() or not leaf.numel() for leaf in found):
        return []
    first, is_point = found[0], found[0].is_floating_point()
    mates = [leaf for leaf in found[1:] if len(leaf) == len(first) and first[0].numel() <= COORDINATES]
    mates = [leaf for leaf in mates if is_point or (leaf.ndim == 1 and not leaf.is_floating_point())]
    others = [leaf for leaf in found[1:] if leaf.is_floating_point() and leaf[0].numel() > COORDINATES]
    return [[first, *mates], *([leaf] for leaf in others if all(leaf is not mate for mate in mates))]


def _views(leaves: list[Tensor]) -> list[Tensor]:
    """Return the samples of a batch as rows of numbers, as they are and sorted: so they are when flipped or rolled.

    Rows of whole numbers, such as words, stay such: how far they are from each other says nothing.
    """
    if not FEWEST <= len(leaves[0]) <= MOST:
        return []
    rows = [leaf.detach().reshape(len(leaf), -1) for leaf in leaves]
    thin = torch.cat([it[:, :: max(1, it.shape[1] // FEATURES)].float() for it in rows], 1)
    if thin.shape[1] > COORDINATES and not leaves[0].is_floating_point():
        return [thin.int(), thin.sort(1).values]
    return [thin, thin.sort(1).values] if thin.shape[1] > COORDINATES else [thin]


def _distance(rows: Tensor, first: tuple[Tensor, Tensor]) -> float:
    """Return how far rows are from the nearest of the first ones; where two of those are the same, by equality."""
    before, between = first
    if rows.shape != before.shape:
        return math.inf
    if not to_float(between.min()) > 0:
        return 0.0 if _is_redrawn(rows, before) else math.inf
    near, place = _apart(rows, before).min(1)
    return to_float((near / between[place]).median()) * (1.0 if rows.is_floating_point() else WORDS)


def _is_redrawn(rows: Tensor, before: Tensor) -> bool:
    """Say whether rows, some of which are the same, are all those that there were, or drawn from the few of them.

    Whole numbers may be states or words, of which there are few.
    """
    (now, counts), (then, counts_before) = (torch.unique(it, dim=0, return_counts=True) for it in (rows, before))
    if torch.equal(now, then) and torch.equal(counts, counts_before):
        return len(now) > 1
    are_few = FEW * len(then) <= len(before) and len(torch.unique(torch.cat([now, then]), dim=0)) == len(then)
    return are_few and not torch.equal(then, then.round())


def _between(rows: Tensor) -> Tensor:
    """Return the distance of each sample to the nearest other one."""
    return _apart(rows, rows).fill_diagonal_(float("inf")).amin(1)


def _apart(rows: Tensor, others: Tensor) -> Tensor:
    """Return the distance between each two rows; of whole numbers, how many differ."""
    return torch.cdist(rows, others) if rows.is_floating_point() else torch.cdist(rows.float(), others.float(), p=0)


def _owner(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is of, or itself."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor
