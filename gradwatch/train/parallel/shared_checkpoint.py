"""Save and load one checkpoint of all ranks together, for any number of ranks.

The state that all ranks share is written by rank 0, as in a training of one process. Each other rank adds a part with
its own state. Tensors that are sharded over the ranks are written by all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gradwatch.errors import CheckpointError
from gradwatch.state import checkpoint_folder, codec, sharded
from gradwatch.state.checkpoint_folder import DamagedError
from gradwatch.train import checkpoint
from gradwatch.train.parallel.ranks import Ranks

RANK_KEYS = ("random", "monitor", "history", "data")
"""Keys of the state that differ between the ranks."""


def save(root: Path, state: Mapping[str, Any], *, step: int, keep: int, best: bool, ranks: Ranks) -> None:
    """Write a checkpoint as `checkpoint.save` does; all ranks must call it at the same step.

    Raises:
        CheckpointError: A rank could not write its part. All ranks raise it, and the older checkpoints are intact.
    """
    rest, tensors = sharded.split(dict(state))
    if not ranks.is_first:
        rest = {key: value for key, value in rest.items() if key in RANK_KEYS}
    work = checkpoint.unfinished(root, step)
    part, shards = checkpoint_folder.part_of(work, ranks.rank), work / sharded.FOLDER

    def write() -> None:
        data, named = codec.encode(rest)
        part.mkdir(parents=True, exist_ok=True)
        is_best = best or checkpoint.was_best(root, step)
        written = sharded.find_files(shards, ranks.rank)
        checkpoint_folder.write(part, data, named, step=step, best=is_best, ranks=ranks.world_size, shards=written)

    try:
        _together(ranks, lambda: checkpoint.begin(work), where=ranks.is_first)
        if tensors:
            _together(ranks, shards.mkdir, where=ranks.is_first)
            _together(ranks, lambda: sharded.write(shards, tensors))
        _together(ranks, write, where=not ranks.is_first)
        _together(ranks, write, where=ranks.is_first)  # last: with its manifest, the checkpoint is complete
        _together(ranks, lambda: checkpoint.finish(work, step=step, keep=keep), where=ranks.is_first)
    except CheckpointError as error:
        if ranks.is_first:
            shutil.rmtree(work, ignore_errors=True)  # give the space back: the disk may be full
        raise CheckpointError(f"{work} cannot be written: {error}; the older checkpoints are intact") from error


def load(
    root: Path, model: nn.Module, optimizer: Any, *, ranks: Ranks, step: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Read the newest good checkpoint as `checkpoint.load` does, of any number of ranks.

    Args:
        root: Folder of the run's checkpoints.
        model: The model, whose parameters may be sharded.
        optimizer: Its optimizer.
        ranks: The ranks, which all call this function.
        step: Read only the checkpoint of this step.

    Returns:
        The step and the state for this rank. It lacks `random`, `monitor` and `history` on a rank that the checkpoint
        has no part of.
    """

    def read(folder: Path) -> dict[str, Any]:
        _together(ranks, lambda: checkpoint_folder.verify(folder, rank=ranks.rank, ranks=ranks.world_size))
        state = _for_rank(folder, ranks)
        found: dict[str, Any] = sharded.read_distributed(state, folder / sharded.FOLDER, model, optimizer)
        return found

    return checkpoint.load_with(read, root, step=step)


def _for_rank(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the state in a verified checkpoint for one rank, with the sharded tensors still to be read."""
    state, saved = checkpoint_folder.read_part(folder), checkpoint_folder.manifest(folder).ranks
    data = state.get("data")
    if ranks.rank:
        state = {key: value for key, value in state.items() if key not in RANK_KEYS}
    if 0 < ranks.rank < saved:
        state |= checkpoint_folder.read_part(checkpoint_folder.part_of(folder, ranks.rank))
    if data is not None and saved != ranks.world_size:
        state["data"] = checkpoint.joined_data(folder, data)
    return state


def _together(ranks: Ranks, action: Callable[[], object], *, where: bool = True) -> None:
    """Run an action on some ranks, wait for all ranks, and raise the error of the first one that failed on all."""
    problem, is_damage = "", False
    try:
        if where:
            action()
    except DamagedError as error:
        problem, is_damage = str(error), True
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"rank {ranks.rank}: {(error.strerror or str(error)).lower()}"
    if found := [text for text in ranks.texts(problem) if text]:
        raise DamagedError(found[0]) if ranks.any(is_damage) else CheckpointError(found[0])
