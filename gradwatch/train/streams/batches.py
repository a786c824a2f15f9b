"""Read the batches of a stream pass by pass, in this process or in workers, from a position that can be saved."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gradwatch.errors import GradwatchError
from gradwatch.train.batches import PREFETCH, as_read, pinned, start_worker
from gradwatch.train.parallel.parts import Indices, Part
from gradwatch.train.streams.shard import Shard, ShardBatch, ShardPosition, check_sharding, is_sharded


@final
class StreamBatches:
    """The batches of an IterableDataset, pass by pass.

    The stream is split into shards: `max(1, workers)` for each rank. Batches are taken from the shards of this rank in
    turn. They depend on (seed, pass, number of shards) only: a resumed run keeps its number of shards.

    Args:
        dataset: An IterableDataset.
        batch_size: Samples in a batch of all ranks.
        seed: Seed of everything random in the dataset.
        drop_last: Whether to leave out the last batch of a shard if it is smaller than the others.
        workers: Processes that read ahead, one for each shard; 0 reads in this process.
        pin_memory: Whether to put batches into page-locked memory if there is a CUDA device.
        part: Part of each batch that this rank reads; by default, the whole batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
        part: Part = Part(),  # noqa: B008 - frozen
    ) -> None:
        if batch_size < part.world_size:
            raise GradwatchError(
                f"data.batch_size: got {batch_size} for {part.world_size} ranks, expected at least one sample for each "
                "rank; the ranks share each batch"
            )
        self.numbers: Indices | None = None
        self._dataset, self._seed, self._drop_last = dataset, seed, drop_last
        self._batch_size = len(part.of(np.arange(batch_size)))
        self._workers, self._rank, self._ranks = workers, part.rank, part.world_size
        self._pin = pin_memory and torch.cuda.is_available()
        self._count = max(1, workers) * part.world_size
        check_sharding(dataset, count=self._count)
        self._loaded: Iterator[ShardBatch | None] | None = None
        self._indices: range  # of the shards of this rank
        self._positions: list[ShardPosition]
        self._epoch: int
        self._batch: int
        self._turn: int
        self._begin(0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of a pass: tuples of inputs and targets.

        Args:
            epoch: Number of the pass, from 0.
            start: Batches to skip at its beginning. They are not read if this is the loaded position.
        """
        skipped = 0
        if (epoch, start) != (self._epoch, self._batch):
            self._begin(epoch)
            skipped = start
        for batch in itertools.islice(self._batches(), skipped, None):
            # after islice, so that skipped batches are not copied
            yield pinned(batch) if self._pin else batch

    def ahead(self, first: int, count: int) -> list[tuple[Any, Indices]]:
        """Read batches after the current position, and stay there.

        Args:
            first: Batches to leave out.
            count: Number of batches.

        Returns:
            Each batch with the numbers of its samples in their pass.
        """
        before = self._epoch, self._batch, self._turn, list(self._positions)
        found: list[tuple[Any, Indices]] = []
        while len(found) < first + count:
            here = len(found)
            for batch in self.epoch(self._epoch, self._batch):
                assert self.numbers is not None, "set with each batch"
                found.append((batch, self.numbers))
                if len(found) == first + count:
                    break
            else:
                if len(found) == here and not self._batch:
                    break  # an empty pass: the stream has no more batches
                self._begin(self._epoch + 1)
        self._epoch, self._batch, self._turn, self._positions = before
        return found[first:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain data."""
        shards = [asdict(position) for position in self._positions]
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "turn": self._turn,
            "count": self._count,
            "shards": dict(zip(map(str, self._indices), shards, strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with the shards that the run began with if they fit the number of ranks.

        Args:
            state: From `state_dict`; with several ranks, it has the shards of all ranks.
        """
        saved = {int(index): ShardPosition(**position) for index, position in state["shards"].items()}
        self._loaded = None
        if state["count"] % self._ranks == 0:
            self._count = state["count"]
            self._begin(state["epoch"])
            self._positions = [saved[index] for index in self._indices]
            self._turn = state["turn"] % len(self._indices)
            self._warn_about_skipping()
        else:
            self._begin(state["epoch"])
            self._split_again(saved)
        self._batch = state["batch"]

    def close(self) -> None:
        """End the worker processes."""
        self._loaded = None  # the loader's iterator ends its workers when it is garbage-collected

    def _begin(self, epoch: int) -> None:
        """Move to the beginning of a pass."""
        self._indices = range(self._rank, self._count, self._ranks)
        self._positions = [ShardPosition() for _ in self._indices]
        self._epoch, self._batch, self._turn = epoch, 0, 0

    def _batches(self) -> Iterator[Any]:
        shards = [self._shard(index) for index in self._indices]
        # a dataset that splits itself by worker needs its worker processes
        if self._workers or (len(shards) > 1 and is_sharded(self._dataset)):
            self._start_workers(shards)
            loaded = True
        else:
            passes = [s.batches(self._epoch, p) for s, p in zip(shards, self._positions, strict=True)]
            loaded = False
        while not all(position.is_ended for position in self._positions):
            turn = self._turn
            self._turn = (turn + 1) % len(shards)
            # through the attribute: `close` must hold the last reference to the loader's iterator
            item = self._next_loaded() if loaded else next(passes[turn], None)
            if item is None:
                self._positions[turn] = replace(self._positions[turn], is_ended=True)
                continue
            if isinstance(item.content, GradwatchError):
                raise item.content
            self._positions[turn], self.numbers = item.position, item.numbers
            self._batch += 1
            yield item.content
        self._loaded = None

    def _next_loaded(self) -> ShardBatch | None:
        assert self._loaded is not None, "the workers are running"
        return next(self._loaded)

    def _shard(self, index: int) -> Shard:
        return Shard(
            dataset=self._dataset,
            index=index,
            count=self._count,
            batch_size=self._batch_size,
            seed=self._seed,
            drop_last=self._drop_last,
        )

    def _start_workers(self, shards: list[Shard]) -> None:
        """Start one worker for each shard of this rank, which reads it from its position."""
        loader = DataLoader(
            _WorkerStream(shards, self._positions, epoch=self._epoch, turn=self._turn),
            batch_size=None,
            num_workers=len(shards),
            collate_fn=as_read,
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(0),  # without one, DataLoader advances the global generator
            prefetch_factor=PREFETCH,
        )
        self._loaded = iter(loader)
        for _ in range(self._turn):  # a loader begins with its first worker
            next(self._loaded)

    def _warn_about_skipping(self) -> None:
        if read := max((p.samples for p in self._positions if p.state is None), default=0):
            warnings.warn(
                f"data: {type(self._dataset).__name__} has no state_dict and load_state_dict, so the first {read:,} "
                "samples of this pass are read again and skipped, which takes as long as the first time",
                RuntimeWarning,
                stacklevel=3,
            )

    def _split_again(self, saved: Mapping[int, ShardPosition]) -> None:
        """Distribute the rest of a pass over a different number of shards."""
        # a dataset that splits itself counts the samples of its own shard, others count all samples of the dataset
        splits_itself = hasattr(self._dataset, "shard") or is_sharded(self._dataset)
        done = [position.samples for position in saved.values()]
        read = sum(done) // self._count if splits_itself else max(done)
        self._positions = [ShardPosition(samples=read) for _ in self._indices]
        warnings.warn(
            f"data: the run began with its stream in {len(saved)} shards, which {self._ranks} ranks cannot share; it "
            f"continues with {self._count}: a few samples of this pass may be skipped or read twice, and each shard "
            f"reads {read:,} samples again to find its position",
            RuntimeWarning,
            stacklevel=3,
        )


@final
class _WorkerStream(IterableDataset[Any]):
    """Yields the batches of the worker's shard, and then None without end.

    The end of a worker's iterator would change the order in which a DataLoader asks the others, depending on timing.
    """

    def __init__(self, shards: list[Shard], positions: list[ShardPosition], *, epoch: int, turn: int) -> None:
        self._shards, self._positions = shards, positions
        self._epoch, self._turn = epoch, turn

    def __iter__(self) -> Iterator[ShardBatch | None]:
        info = get_worker_info()
        assert info is not None, "read by worker processes only"
        if info.id < self._turn:
            yield None  # these workers have had their turn in this round
        yield from self._shards[info.id].batches(self._epoch, self._positions[info.id])
        yield from itertools.repeat(None)
