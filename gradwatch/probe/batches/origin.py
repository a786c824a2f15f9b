"""Find out whether a batch that comes again is all of the script's data, or a part of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradwatch.events import PART_BATCH, REMADE_BATCH, TENSOR_HELD, Observation
from gradwatch.probe.batches.batch_hash import tensors
from gradwatch.records import Event

MAX_PART = 0.5
"""Largest fraction of a tensor that counts as a part of it: at least half of the data are usually for training."""

MAX_NUMBERS = 100_000_000
"""Maximum number of values of a tensor that is searched, which takes 0.1 s."""

MIN_NUMBERS = 2
"""Minimum number of values of a sample that is looked for: another tensor may have a single value by chance."""

SOUGHT_SAMPLES = 4
"""Number of samples of a batch that are looked for, spread evenly."""


@final
class BatchOrigin:
    """Look for the data that a repeated batch comes from, at two steps in a row.

    A DataLoader that gives everything in one batch of this size shows that the batch is all the data, and one that
    gives several shows that it is a part. Without one, a batch that is made at each step is a part of any larger tensor
    with the same samples. It is all the data if something with as many rows outlives the step: a table, a list or
    labels that the loop converts each time. If nothing does, a generator that is seeded again makes the batch.
    """

    def __init__(self) -> None:
        self._is_waiting = False
        self._samples = 0
        self._candidates: list[Any] = []

    def look(self, leaf: Tensor, *, samples: int, is_held: bool, is_made: bool) -> Iterator[Observation]:
        """Yield whether a batch is passed again, and whether there are more data. Searching all objects takes 50 ms.

        Args:
            leaf: The first tensor of the batch, of shape (rows, ...).
            samples: Number of samples of the batch.
            is_held: Whether the loop passes the same memory again.
            is_made: Whether it passes another tensor, which may be another view of that memory.
        """
        things, values = gc.get_objects(), {"samples": samples}
        # `type` rather than `isinstance`, which asks proxies of other libraries for their class
        loaders = [thing for thing in things if issubclass(type(thing), DataLoader)]
        if any(_gives_at_once(loader, samples) for loader in loaders):
            return
        if any(_gives_more(loader, samples) for loader in loaders):
            yield PART_BATCH.observe(values=values, why="a DataLoader gives several batches of this size")
        elif is_made and any(_has_more(thing, leaf) for thing in things if type(thing) is Tensor):
            yield PART_BATCH.observe(values=values, why="a larger tensor has the same samples")
            is_held = False  # a slice of it, which does not advance
        elif not is_held:
            self._is_waiting, self._samples = True, samples
            # kept until the next step, so that nothing new can have their identity
            self._candidates = list(_in_sight(samples))
        if is_held:
            yield TENSOR_HELD.observe()

    def look_again(self) -> Iterator[Observation]:
        """Yield an observation if nothing with as many rows as a batch that is made at each step outlives the step."""
        if not self._is_waiting:
            return
        before = {id(thing) for thing in self._candidates}
        self._is_waiting, self._candidates = False, []
        if not any(id(thing) in before for thing in _in_sight(self._samples)):
            yield REMADE_BATCH.observe(values={"samples": self._samples})


@final
class UnreadBatch:
    """Look for the data of the batch of step 1 as if it came again, without its values.

    For batches whose values must not be read, because that waits for a device, and for those that have no rows to
    compare. The hashes of later steps show whether the batch does come again.
    """

    def __init__(self) -> None:
        self._first: Callable[[], Tensor | None] = lambda: None
        self._origin = BatchOrigin()

    def inspect(self, batch: Any, *, step: int) -> Iterator[Event]:
        """Yield what is known of the batch of step 1.

        Args:
            batch: The inputs of the step, any nest of tensors.
            step: Optimizer step.
        """
        yield from (found.at(step) for found in self._origin.look_again())
        leaf = next((leaf for leaf in tensors(batch) if leaf.ndim), None) if step <= 1 else None
        if leaf is None:
            return
        if step == 0:
            self._first = weakref.ref(leaf)
            return
        is_same = leaf is self._first()
        found = self._origin.look(leaf, samples=len(leaf), is_held=is_same, is_made=not is_same)
        yield from (it.at(step) for it in found)


def _gives_at_once(loader: Any, samples: int) -> bool:
    """Return whether a DataLoader gives all of its data in one batch of this size."""
    try:
        return len(loader) == 1 and len(loader.dataset) == samples
    except Exception:  # of any kind: the data set is the script's, and a stream has no length
        return False


def _gives_more(loader: Any, samples: int) -> bool:
    """Return whether a DataLoader gives several batches of this size."""
    try:
        size = loader.batch_size or loader.batch_sampler.batch_size
        return bool(size == samples) and len(loader) > 1
    except Exception:  # as above, and a sampler of batches may have no size
        return False


def _has_more(other: Tensor, leaf: Tensor) -> bool:
    """Return whether a tensor has the samples of a batch, and at least as many others."""
    is_comparable = (
        other.device.type == leaf.device.type == "cpu"
        and other.dtype == leaf.dtype
        and other.layout == leaf.layout == torch.strided
    )
    if not is_comparable or not leaf.numel() <= MAX_PART * min(other.numel(), MAX_NUMBERS):
        return False
    if leaf[0].numel() < MIN_NUMBERS or not other.is_contiguous():
        return False
    flat = other.detach().view(-1)
    rows = torch.linspace(0, len(leaf) - 1, SOUGHT_SAMPLES).long()
    return all(_is_inside(sample, flat) for sample in leaf.detach()[rows].flatten(1))


def _is_inside(sample: Tensor, flat: Tensor) -> bool:
    """Return whether the values of a sample follow one another somewhere in a vector."""
    starts = (flat[: len(flat) - len(sample) + 1] == sample[0]).nonzero().view(-1)
    for i in range(1, len(sample)):
        if not len(starts):
            break
        starts = starts[flat[starts + i] == sample[i]]
    return len(starts) > 0


def _in_sight(length: int) -> Iterator[Any]:
    """Yield what has a length among the variables of the functions that are being called, and among their members."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("gradwatch."):
            for value in (*frame.f_locals.values(), *frame.f_globals.values()):
                yield from (thing for thing in (value, *_members(value)) if _has_length(thing, length))
        frame = frame.f_back


def _members(value: Any) -> tuple[Any, ...]:
    """Return the values of a dictionary, or the attributes of an object."""
    try:
        return tuple(value.values() if type(value) is dict else vars(value).values())
    except Exception:  # of any kind: the object is the script's, and many have no attributes
        return ()


def _has_length(thing: Any, length: int) -> bool:
    """Return whether a table, a list, a tensor or a data set has as many rows."""
    if issubclass(type(thing), (nn.Module, nn.Parameter, DataLoader, str, bytes)):
        return False
    try:
        return bool(len(thing) == length)
    except Exception:  # of any kind: the object is the script's, and most have no length
        return False
