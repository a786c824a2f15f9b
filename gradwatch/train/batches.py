"""Read batches in an order that is a pure function of (seed, epoch): a data position is two integers."""

# N = samples, B = samples of a batch

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from gradwatch.data import Batched
from gradwatch.data._randomness import preserved, seed_global, seed_of
from gradwatch.data._sample_files import read_sample, sample_name
from gradwatch.errors import GradwatchError
from gradwatch.train.parallel.parts import Indices, Part, StandIn

GRACE_S = 20
"""Seconds that a worker continues after a SIGTERM."""
PREFETCH = 2  # batches that each worker reads ahead; torch's own default


@final
class Batches:
    """The batches of a dataset, epoch by epoch.

    The samples of a batch depend only on (seed, epoch). A random transform of a sample depends only on (seed, epoch,
    index). Neither depends on the number of workers, or on where in the epoch reading starts. The global random
    generators of this process do not change. Workers live until `close`; one epoch is read at a time.

    Args:
        dataset: Map-style. A `Batched` dataset is read a batch at a time. A dataset with `is_random = False` is not
            seeded for each sample.
        batch_size: Samples in a batch.
        seed: Seed of the order and of the random transforms.
        shuffle: Whether to visit the samples in a new random order in each epoch.
        drop_last: Whether to leave out the last batch of an epoch if it is smaller than the others.
        workers: Processes that read ahead; 0 reads in this process.
        pin_memory: Whether to put batches into page-locked memory if there is a CUDA device.
        part: Part of each batch that `epoch` yields, on one of several ranks; by default, the whole batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
        part: Part = Part(),  # noqa: B008 - frozen
    ) -> None:
        self._reader = _BatchReader(dataset, seed=seed)
        self._plan = _Plan(
            len(self._reader), batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, part=part
        )
        self._workers = workers
        self._pin = pin_memory and torch.cuda.is_available()
        self._loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._plan)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch: tuples of inputs and targets, first dimension B.

        On one of several ranks, only the rank's part of each batch is read; a `StandIn` if no sample is left for it.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to skip at its beginning, because a resumed run has seen them.
        """
        assert 0 <= start <= len(self), f"an epoch has {len(self)} batches, cannot start at {start}"
        self._plan.epoch, self._plan.start = epoch, start
        for number, batch in enumerate(self._read_ahead() if self._workers else self._read_here(), start):
            if isinstance(batch, GradwatchError):
                raise batch  # passed as a value, see _BatchReader.__getitem__
            yield StandIn(batch) if self._plan.has_stand_in(number) else batch

    def indices(self, epoch: int, batch: int) -> Indices:
        """Return the sample indices, shape (B,), of one whole batch of an epoch."""
        return self._plan.indices(epoch, batch)

    def read(self, epoch: int, batch: int) -> Any:
        """Read one whole batch of an epoch in this process, without disturbing the current epoch."""
        read = self._reader[epoch, self.indices(epoch, batch)]
        if isinstance(read, GradwatchError):
            raise read
        return read

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None  # the loader's iterator ends its workers when it is garbage-collected

    def _read_here(self) -> Iterator[Any]:
        read, pin = self._reader.__getitem__, self._pin
        for key in self._plan:
            yield pinned(read(key)) if pin else read(key)

    def _read_ahead(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = DataLoader(
                self._reader,
                batch_size=None,  # each key of the plan is already a whole batch
                sampler=self._plan,
                num_workers=self._workers,
                collate_fn=as_read,
                pin_memory=self._pin,
                worker_init_fn=start_worker,
                generator=torch.Generator().manual_seed(0),  # without one, DataLoader advances the global generator
                prefetch_factor=PREFETCH,
                persistent_workers=True,  # workers serve all epochs, see `Batches`
            )
        return iter(self._loader)


@final
class _Plan:
    """The samples of each remaining batch of the current epoch."""

    def __init__(self, size: int, *, batch_size: int, seed: int, shuffle: bool, drop_last: bool, part: Part) -> None:
        if batch_size < 1:
            raise GradwatchError(f"data.batch_size: got {batch_size}, expected at least 1")
        if drop_last and batch_size > size:
            raise GradwatchError(
                f"data.batch_size: got {batch_size} for {size} samples, and data.drop_last leaves out a batch "
                f"that is not full: none would be left; expected at most {size}, or drop_last: false"
            )
        if batch_size < part.world_size:
            raise GradwatchError(
                f"data.batch_size: got {batch_size} for {part.world_size} ranks, expected at least one sample for each "
                "rank; the ranks share each batch"
            )
        self.size = size
        self.part = part
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_batches = size // batch_size if drop_last else -(-size // batch_size)
        self.epoch = 0
        self.start = 0
        self._ordered: tuple[int, Indices] | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        """Yield the epoch and the sample indices, shape (B,), of each batch."""
        epoch, size = self.epoch, self.batch_size
        order_N = self._order(epoch)
        for first in range(self.start * size, self.num_batches * size, size):
            yield epoch, self.part.of(order_N[first : first + size])

    def has_stand_in(self, batch: int) -> bool:
        """Return whether no sample of a batch is left for this rank."""
        return self.part.rank > 0 and self.part.is_empty(min(self.batch_size, self.size - batch * self.batch_size))

    def indices(self, epoch: int, batch: int) -> Indices:
        """Return the sample indices of one batch of an epoch."""
        first = batch * self.batch_size
        return self._order(epoch)[first : first + self.batch_size]

    def _order(self, epoch: int) -> Indices:
        """Return the sample indices in the order of an epoch, and cache the order of the last requested epoch."""
        if self._ordered is None or self._ordered[0] != epoch:
            # seed_of, not seed + epoch: neighboring seeds and epochs must give unrelated orders
            random = np.random.default_rng(seed_of(self.seed, epoch))
            self._ordered = epoch, random.permutation(self.size) if self.shuffle else np.arange(self.size)
        return self._ordered[1]


@final
class _BatchReader(Dataset[Any]):
    """Reads the batch of a key (epoch, indices), in this process or in a worker, which has no other state."""

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # a foreign dataset does not say whether it is random, so it is seeded for each sample
        self.is_random = bool(getattr(dataset, "is_random", True))
        self.batched = dataset if not self.is_random and isinstance(dataset, Batched) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, Indices]) -> Any:
        """Return a batch, or a GradwatchError as a value: an error raised in a worker would lose its message."""
        epoch, indices_B = key
        if self.batched is not None:
            return self.batched.batch(torch.from_numpy(indices_B))
        try:
            with preserved() if self.is_random else contextlib.nullcontext():
                samples = [self._sample(epoch, int(i)) for i in indices_B]
            return _collate(samples, self.dataset, indices_B)
        except GradwatchError as error:
            return error

    def _sample(self, epoch: int, index: int) -> Any:
        if self.is_random:
            seed_global(seed_of(self.seed, epoch, index))
        try:
            return read_sample(self.dataset, index)
        except GradwatchError:
            raise
        except Exception as error:
            # a bug in the user's dataset keeps its type and traceback
            error.add_note(f"while reading {sample_name(self.dataset, index)} of the data (epoch {epoch})")
            raise


def _collate(samples: list[Any], dataset: Any, indices_B: Indices) -> Any:
    return stacked(samples, [sample_name(dataset, int(i)) for i in indices_B])


def stacked(samples: list[Any], names: Sequence[str]) -> Any:
    """Stack samples into a batch, or raise an error that names two samples of different shapes."""
    try:
        return tuple(default_collate(samples))
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = [tuple(inputs.shape) if isinstance(inputs, Tensor) else None for inputs, _ in samples]
        for name, shape in zip(names, shapes, strict=True):
            if shape != shapes[0]:
                raise GradwatchError(
                    f"data: the inputs of {names[0]} have shape {shapes[0]}, and the inputs of {name} have shape "
                    f"{shape}; expected one shape for all; add Resize, CenterCrop or RGB to data.transform"
                ) from error
        raise GradwatchError(f"data: samples cannot be stacked into a batch: {error}") from error


def pinned(batch: Any) -> Any:
    """Return a batch in page-locked memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), batch)


def as_read(batch: Any) -> Any:
    """Return a batch as it is, where a DataLoader would collate it."""
    return batch  # at module level, because a spawned worker must unpickle its collate_fn


def start_worker(_worker: int) -> None:
    """Let the main process handle Ctrl-C and SIGTERM for a new worker process."""
    # Ctrl-C and a SIGTERM to the process group reach workers too, but the main process may need further batches while
    # it saves the run; it ends the workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name == "posix":  # signal.alarm exists only there
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(_number: int, _frame: FrameType | None) -> None:
    """End this worker after `GRACE_S` seconds, or at the next SIGTERM, if the main process does not end it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(GRACE_S)
