"""Join the process group of a training, and exchange a few numbers among its ranks."""

# R = ranks, K = numbers

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist

from gradwatch.config.sections.train import TrainSection
from gradwatch.errors import GradwatchError, RankError
from gradwatch.probe.device.sync import to_host
from gradwatch.train.parallel.environment import Launched, check_parallel

LOST = "Connection closed by peer"
"""Text of gloo's error if the process at the other end of a connection is gone."""

_opened = itertools.count()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a training. Every rank must call the exchanges in the same order.

    Args:
        launched: Place of this process.
    """

    launched: Launched
    _number: int = field(default_factory=lambda: next(_opened))  # of this training, for the keys in the store

    @property
    def rank(self) -> int:
        """Number of this process among all ranks."""
        return self.launched.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.launched.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that prints and draws."""
        return self.launched.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank, in the order of the ranks; all ranks must pass equally many."""
        mine_K = torch.tensor(values, dtype=torch.float64, device="cpu")
        every_RK = [torch.empty_like(mine_K) for _ in range(self.world_size)]
        dist.all_gather(every_RK, mine_K)
        return [list(map(float, to_host(row_K))) for row_K in every_RK]

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is set."""
        return any(row[0] for row in self.gather([float(flag)]))

    def texts(self, text: str) -> list[str]:
        """Return the text of each rank, in the order of the ranks."""
        every = [""] * self.world_size
        dist.all_gather_object(every, text)
        return every

    @contextlib.contextmanager
    def first_on_each_machine(self) -> Iterator[None]:
        """Let one rank of each machine pass before the others, such as to download the data."""
        if self.launched.local_rank:
            dist.barrier()
        yield
        if not self.launched.local_rank:
            dist.barrier()

    def failure(self, error: BaseException) -> BaseException:
        """Return the error of this rank if it is the first to fail, else a `RankError`, and note it for the others."""
        if LOST in str(error):
            text = "lost the connection to another rank, which ended without an error, such as by SIGKILL"
            error = GradwatchError(f"rank {self.rank}: {text}")
        key = f"gradwatch/{self._number}/failures"
        first = {"rank": self.rank, "is_mistake": isinstance(error, GradwatchError), "text": str(error)}
        try:
            store = dist.distributed_c10d._get_default_store()  # there is no public name
            if store.add(f"{key}/count", 1) == 1:
                store.set(key, json.dumps(first))
                return error
            first = json.loads(store.get(key))
        except RuntimeError:  # the process that keeps the store is gone, so it failed first
            first = {"rank": 0, "is_mistake": False, "text": "its process is gone"}
        return RankError(
            f"rank {self.rank} ends because rank {first['rank']} has failed: {first['text']}",
            is_mistake=bool(first["is_mistake"]),
        )


@contextlib.contextmanager
def joined_ranks(train: TrainSection) -> Iterator[Ranks | None]:
    """Join the process group for a training, and leave it at the end; None if there is one process.

    A process group that exists is used, and kept.

    Raises:
        GradwatchError: The config cannot train on this number of ranks, or a rank has no device.
        RankError: Another rank has failed before this one.
    """
    is_ours = not dist.is_initialized()
    launched = Launched.read() if is_ours else _of_group()
    check_parallel(train, launched.world_size)
    if launched.world_size < 2:
        yield None
        return
    is_cuda = train.device == "cuda" or (train.device == "auto" and torch.cuda.is_available())
    if is_cuda:
        _select_device(launched)
    if is_ours:
        # gloo in any case: small exchanges go through the CPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    ranks = Ranks(launched=launched)
    try:
        yield ranks
    except Exception as error:
        if (failure := ranks.failure(error)) is error:
            raise
        raise failure from error
    except BaseException as quit_at_once:  # the second Ctrl-C: the other ranks lose this one
        ranks.failure(quit_at_once)
        raise
    dist.barrier()  # a rank that leaves early would end the exchanges of the others
    if is_ours:
        dist.destroy_process_group()


def _of_group() -> Launched:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    launched = Launched.read()
    if launched.world_size == world_size:
        return launched
    return Launched(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def _select_device(launched: Launched) -> None:
    devices = torch.cuda.device_count()
    if launched.local_rank >= devices:
        raise GradwatchError(
            f"train.device: {launched.local_world_size} ranks on this machine, which has {devices} CUDA devices, "
            f"expected at most one rank per device; start {devices} ranks, or set train.device: cpu"
        )
    torch.cuda.set_device(launched.local_rank)


def is_first(ranks: Ranks | None) -> bool:
    """Return whether this process is rank 0, or the only one."""
    return ranks is None or ranks.is_first


def any_of(ranks: Ranks | None, flag: bool) -> bool:
    """Return whether the flag of any rank is set; with one process, its flag."""
    return flag if ranks is None else ranks.any(flag)
