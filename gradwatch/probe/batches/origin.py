"""Determine whether a repeated batch is all of the script's data or a part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradwatch.events import PART_BATCH, TENSOR_HELD, WORKERS, Observation
from gradwatch.probe.batches.batch_hash import tensors
from gradwatch.probe.objects import live
from gradwatch.probe.place import users_frames, variables_of
from gradwatch.records import Event

MAX_COORDINATES = 4
"""Maximum number of values of a sample that may be a point in space and time, from a fixed grid."""

MAX_PART = 0.5
"""Largest fraction of a tensor that counts as a part of it: at least half of the data are usually for training."""

MAX_NUMBERS = 100_000_000
"""Maximum number of values of a tensor that is searched, which takes 0.1 s."""

MIN_NUMBERS = 2
"""Minimum number of values of a sample to search for: another tensor may contain a single value by chance."""

SOUGHT_SAMPLES = 4
"""Number of samples of a batch to search for, spread evenly."""

SEVERAL = "a DataLoader gives several batches of this size"
MADE_AGAIN = "it is made again at each step, and the loop keeps nothing of that length"
"""Reasons why a batch is a part of the data."""


@final
class BatchOrigin:
    """Look for the data that a repeated batch comes from, at two steps in a row.

    If a DataLoader yields a single batch of this size, the batch is all the data. If it yields several, the batch is a
    part. Without a DataLoader, a batch that is made at each step is a part of any larger tensor with the same samples.
    It is all the data if something with as many rows outlives the step: a table, a list or labels that the loop
    converts each time. Otherwise a generator that is seeded again makes the batch.
    """

    def __init__(self) -> None:
        self._is_waiting = False
        self._samples = 0
        self._candidates: list[Any] = []

    def look(self, leaf: Tensor, *, samples: int, is_held: bool, is_made: bool) -> Iterator[Observation]:
        """Yield whether a batch is passed again, and whether there is more data.

        Args:
            leaf: The first tensor of the batch, of shape (rows, ...).
            samples: Number of samples of the batch.
            is_held: Whether the loop passes the same memory again.
            is_made: Whether it passes another tensor, which may be another view of that memory.
        """
        if (workers := _most_workers(samples)) > 1:
            yield WORKERS.observe(values={"workers": workers})
        is_part = _is_part_of_a_loader(samples)
        if is_part is False:
            return
        if is_part:
            yield PART_BATCH.observe(values={"samples": samples}, why=SEVERAL)
        elif is_made and any(_has_more(data, leaf) for data in _all_tensors(leaf.dtype)):
            yield PART_BATCH.observe(values={"samples": samples}, why="a larger tensor has the same samples")
            is_held = False  # a slice of it, which does not advance
        elif not is_held and not _may_be_grid(leaf):
            self._is_waiting, self._samples = True, samples
            # kept until the next step, so that nothing new can have their identity
            self._candidates = _tables(samples)
        if is_held:
            yield TENSOR_HELD.observe()

    def look_again(self) -> Iterator[Observation]:
        """Yield an observation if nothing with as many rows as a batch that is made at each step outlives the step."""
        if not self._is_waiting:
            return
        before = {id(thing) for thing in self._candidates}
        self._is_waiting, self._candidates = False, []
        if not any(id(thing) in before for thing in _tables(self._samples)):
            yield PART_BATCH.observe(values={"samples": self._samples}, why=MADE_AGAIN)


@final
class UnreadBatch:
    """Report what is known about the batch of step 1 without reading its values.

    For batches whose values must not be read, because reading waits for a device, and for batches without rows to
    compare. The hashes of later steps show whether the batch is repeated.
    """

    def __init__(self) -> None:
        self._first: Callable[[], Tensor | None] = lambda: None

    def inspect(self, batch: Any, *, step: int) -> Iterator[Event]:
        """Yield whether the tensor of step 0 is passed again, and whether a DataLoader has more data.

        Args:
            batch: The inputs of the step, any nest of tensors.
            step: Optimizer step.
        """
        leaf = next((leaf for leaf in tensors(batch) if leaf.ndim), None) if step <= 1 else None
        if leaf is None:
            return
        if step == 0:
            self._first = weakref.ref(leaf)
            return
        if leaf is self._first():
            yield TENSOR_HELD.emit(step=step)
        if (workers := _most_workers(len(leaf))) > 1:
            yield WORKERS.emit(step=step, values={"workers": workers})
        if _is_part_of_a_loader(len(leaf)):
            yield PART_BATCH.emit(step=step, values={"samples": len(leaf)}, why=SEVERAL)


def _most_workers(samples: int) -> int:
    """Return the largest number of workers of a DataLoader with batches of a size."""
    return max((loader.num_workers for loader in live(DataLoader) if loader.batch_size == samples), default=0)


def _is_part_of_a_loader(samples: int) -> bool | None:
    """Return whether a DataLoader yields several batches of a size, False if one yields all in one, None if unknown."""
    loaders = live(DataLoader)
    if any(_has_one_batch(loader, samples) for loader in loaders):
        return False
    return True if any(_has_several_batches(loader, samples) for loader in loaders) else None


def _has_one_batch(loader: Any, samples: int) -> bool:
    """Return whether a DataLoader yields all of its data in one batch of this size."""
    try:
        return len(loader) == 1 and len(loader.dataset) == samples
    except Exception:  # of any kind: the data set is the script's, and a stream has no length
        return False


def _has_several_batches(loader: Any, samples: int) -> bool:
    """Return whether a DataLoader yields several batches of this size."""
    try:
        size = loader.batch_size or loader.batch_sampler.batch_size
        return bool(size == samples) and len(loader) > 1
    except Exception:  # as above, and a sampler of batches may have no size
        return False


def _may_be_grid(leaf: Tensor) -> bool:
    """Return whether the samples may be points in space and time, which a loop makes at each step without any data."""
    return leaf.is_floating_point() and leaf[0].numel() <= MAX_COORDINATES


def _has_more(other: Tensor, leaf: Tensor) -> bool:
    """Return whether a tensor contains the samples of a batch, and at least as many others."""
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
    # no tensor of indices: it would be made on the script's default device
    rows = (i * (len(leaf) - 1) // (SOUGHT_SAMPLES - 1) for i in range(SOUGHT_SAMPLES))
    return all(_is_inside(leaf[row].detach().reshape(-1), flat) for row in rows)


def _is_inside(sample: Tensor, flat: Tensor) -> bool:
    """Return whether the values of a sample follow one another somewhere in a vector."""
    starts = (flat[: len(flat) - len(sample) + 1] == sample[0]).nonzero().view(-1)
    for i in range(1, len(sample)):
        if not len(starts):
            break
        starts = starts[flat[starts + i] == sample[i]]
    return len(starts) > 0


def _in_sight() -> Iterator[Any]:
    """Yield the variables of the functions that are being called, and their attributes and values."""
    for frame in users_frames():
        for value in (*variables_of(frame).values(), *frame.f_globals.values()):
            yield from (value, *_members(value))


def _members(value: Any) -> tuple[Any, ...]:
    """Return the values of a dictionary, or the attributes of an object."""
    try:
        return tuple(value.values() if type(value) is dict else vars(value).values())
    except Exception:  # of any kind: the object is the script's, and many have no attributes
        return ()


def _all_tensors(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the plain tensors of the process, and the NumPy arrays in sight as tensors of a type."""
    yield from (tensor for tensor in live(Tensor) if type(tensor) is Tensor)
    for array in _in_sight():
        if type(array) is np.ndarray:
            with suppress(TypeError, ValueError):  # texts and objects, or steps that torch does not know
                yield torch.from_numpy(array).to(dtype)


def _tables(rows: int) -> list[Any]:
    """Return the tensors, arrays, tables, data sets and lists of numbers in sight that have as many rows."""
    return [thing for thing in _in_sight() if _has_rows(thing, rows)]


def _has_rows(thing: Any, rows: int) -> bool:
    try:
        if type(thing) in (list, tuple):
            return len(thing) == rows and isinstance(thing[0], (int, float, list, tuple, Tensor, np.ndarray))
        if issubclass(type(thing), Dataset):
            return len(thing) == rows
        # an attribute of the class: others may be made on demand, by code of the script
        return hasattr(type(thing), "shape") and bool(thing.shape[0] == rows) and type(thing) is not nn.Parameter
    except Exception:  # of any kind: the object is the script's, and most have no rows
        return False
