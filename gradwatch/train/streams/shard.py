"""Read one shard of a stream batch by batch, and return the position after each batch."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.data._randomness import preserved, seed_global, seed_of
from gradwatch.data._transforms import TransformedStream
from gradwatch.errors import GradwatchError
from gradwatch.train.batches import stacked

SPLITTERS = ("get_worker_info", "get_rank")
"""Functions by which a dataset finds its own share of the samples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """Position in one pass over a shard: plain data, for a checkpoint.

    Args:
        samples: Samples that were taken from the dataset, including those of other shards.
        state: State of the dataset after these samples, from its `state_dict`, or None if it has none.
        is_ended: Whether the pass over the shard has ended.
    """

    samples: int = 0
    state: Any = None
    is_ended: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """A batch of a shard.

    Args:
        content: Inputs and targets, or an error as a value: an error raised in a worker would lose its message.
        numbers: Number of each sample in the pass over the dataset.
        position: Position after the batch.
    """

    content: Any
    numbers: NDArray[np.int64]
    position: ShardPosition


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of several disjoint parts of a stream.

    A dataset with a method `shard(num_shards=, index=)` splits itself. A dataset with `is_sharded = True` gives each
    rank and worker its own samples. Of any other dataset, shard k of n takes the samples k, k + n, k + 2n, ...

    Args:
        dataset: An IterableDataset.
        index: Number of the shard, from 0.
        count: Number of shards.
        batch_size: Samples of a batch.
        seed: Seed of everything random in the dataset.
        drop_last: Whether to leave out a last batch that is not full.
    """

    dataset: Any
    index: int
    count: int
    batch_size: int
    seed: int
    drop_last: bool

    def batches(self, epoch: int, begin: ShardPosition) -> Iterator[ShardBatch]:
        """Yield the remaining batches of a pass."""
        if begin.is_ended:
            return
        numbers: list[int] = []
        samples: list[Any] = []
        try:
            reader = _SampleReader.open(self, epoch, begin)
            for number, sample in reader:
                if self._owns(number):
                    numbers.append(number)
                    samples.append(sample)
                if len(samples) == self.batch_size:
                    yield _batch(samples, numbers, reader.position())
                    numbers, samples = [], []
            if samples and not self.drop_last:
                yield _batch(samples, numbers, reader.position())
        except GradwatchError as error:
            yield ShardBatch(content=error, numbers=np.zeros(0, np.int64), position=begin)

    def source(self) -> Any:
        """Return the dataset to read for this shard."""
        return self.dataset.shard(num_shards=self.count, index=self.index) if self._splits_itself else self.dataset

    def _owns(self, number: int) -> bool:
        return self._splits_itself or is_sharded(self.dataset) or number % self.count == self.index

    @property
    def _splits_itself(self) -> bool:
        return self.count > 1 and hasattr(self.dataset, "shard")


def is_sharded(dataset: Any) -> bool:
    """Return whether a dataset gives each rank and worker its own samples."""
    return bool(getattr(dataset, "is_sharded", False))


def check_sharding(dataset: Any, *, count: int) -> None:
    """Refuse a dataset that would be split twice: by its own code, and into shards."""
    if count == 1 or hasattr(dataset, "shard") or hasattr(dataset, "is_sharded"):
        return
    plain = dataset.base if isinstance(dataset, TransformedStream) else dataset
    code = getattr(inspect.unwrap(type(plain).__iter__), "__code__", None)
    if found := [name for name in SPLITTERS if code and name in code.co_names]:
        raise GradwatchError(
            f"data.target: {type(plain).__name__}.__iter__ calls {found[0]}, so it may split its samples itself; set "
            "is_sharded = True on the class if each rank and each worker gets other samples, or is_sharded = False if "
            "each gets all samples, so that gradwatch splits them"
        )


@final
class _SampleReader:
    """Iterates over the samples of a dataset in one pass, with seeded random numbers."""

    def __init__(self, shard: Shard, epoch: int, source: Any) -> None:
        self.samples = 0
        self._source = source
        self._epoch = epoch
        self._seed = shard.seed
        # samples of one number differ between the shards of a dataset that splits itself
        self._salt = 0 if source is shard.dataset and not is_sharded(source) else shard.index + 1
        self._is_random = bool(getattr(source, "is_random", True))
        self._iterator: Iterator[Any] = iter(())
        self._stateful: Any = None

    @classmethod
    def open(cls, shard: Shard, epoch: int, begin: ShardPosition) -> Self:
        """Return a reader at a position of a pass."""
        reader = cls(shard, epoch, shard.source())
        with reader._seeded(0):
            reader._begin(begin.state)
        if begin.state is not None:
            reader.samples = begin.samples
        else:  # without a state of the dataset, its samples are read again
            for _ in zip(range(begin.samples), reader, strict=False):
                pass
        return reader

    def _begin(self, state: Any) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        if state is not None and not _is_stateful(self._source):
            self._iterator = iter(self._source)
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]  # it had a state when it was saved
        else:
            if state is not None:
                self._source.load_state_dict(state)
            self._iterator = iter(self._source)
        self._stateful = next((one for one in (self._source, self._iterator) if _is_stateful(one)), None)

    def position(self) -> ShardPosition:
        """Return the position after the last sample."""
        # copied, since the dataset may change its state before the copy is sent to the main process
        state = copy.deepcopy(self._stateful.state_dict()) if self._stateful is not None else None
        return ShardPosition(samples=self.samples, state=state)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        number = self.samples
        try:
            with self._seeded(number):
                sample = next(self._iterator)
        except (StopIteration, GradwatchError):
            raise
        except Exception as error:
            error.add_note(f"while reading sample {number:,} of the stream (pass {self._epoch})")
            raise
        self.samples += 1
        return number, sample

    @contextlib.contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed the global generators for a sample: its transforms depend on (seed, epoch, number) only."""
        if not self._is_random:
            yield
            return
        with preserved():
            # the first sample without salt: a dataset that shuffles its files then shuffles them alike in all shards
            seed_global(seed_of(self._seed, self._epoch, self._salt if number else 0, number))
            yield


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _batch(samples: list[Any], numbers: list[int], position: ShardPosition) -> ShardBatch:
    names = [f"sample {number}" for number in numbers]
    return ShardBatch(content=stacked(samples, names), numbers=np.asarray(numbers, np.int64), position=position)
