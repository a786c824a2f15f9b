"""Read how torchrun has launched this process, without torch: its rank and the number of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self, final

from gradwatch.config.sections.train import TrainSection
from gradwatch.errors import GradwatchError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Place of this process among the ranks of a training.

    Args:
        rank: Number of this process among all ranks.
        world_size: Number of ranks.
        local_rank: Number of this process among the ranks of its machine.
        local_world_size: Number of ranks on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def read(cls) -> Self:
        """Read the variables that torchrun sets; without `WORLD_SIZE`, the process is the only rank.

        Raises:
            GradwatchError: A variable is missing or is not a number.
        """
        world_size = _number("WORLD_SIZE", 1)
        if world_size < 2:
            return cls()
        rank = _number("RANK")
        return cls(
            rank=rank,
            world_size=world_size,
            # another launcher, such as srun, may leave these out: then the machine is the only one
            local_rank=_number("LOCAL_RANK", rank),
            local_world_size=_number("LOCAL_WORLD_SIZE", world_size),
        )


def check_parallel(train: TrainSection, world_size: int) -> None:
    """Raise a GradwatchError if a config cannot train on this number of ranks."""
    if world_size < 2:
        return
    if train.parallel == "none":
        raise GradwatchError(
            f"train.parallel: got 'none' for {world_size} ranks, which would train {world_size} copies of the model "
            "on the same data; set train.parallel: ddp, fsdp2 or hsdp, or start one process"
        )
    if train.shard_ranks and world_size % train.shard_ranks:
        raise GradwatchError(
            f"train.shard_ranks: got {train.shard_ranks} for {world_size} ranks, expected a divisor of {world_size}"
        )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        got = f"got {text!r}" if text else "is not set"
        raise GradwatchError(f"{name}: {got} in the environment, expected a number; start the ranks with torchrun")
    return int(text)
