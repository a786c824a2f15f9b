"""Save and load checkpoints: everything for an exact resume, written atomically, verified on read, without pickle."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gradwatch.errors import CheckpointError
from gradwatch.history.disk.atomic import OUT_OF_SPACE
from gradwatch.state import checkpoint_folder, codec
from gradwatch.state.checkpoint_folder import DamagedError

UNFINISHED, REPLACED = ".tmp", ".old"
T = TypeVar("T")


def save(root: Path, state: Mapping[str, Any], *, step: int, keep: int, best: bool = False) -> Path:
    """Write a checkpoint, then delete the checkpoints that are no longer needed.

    The last good checkpoint survives a kill of the process at any time. Checkpoints of later steps are deleted: they
    belong to steps that a resume or rewind has abandoned.

    Args:
        root: Folder of the run's checkpoints; created if missing.
        state: A tree that `codec.encode` accepts.
        step: Optimizer steps made so far.
        keep: Number of newest checkpoints to keep, at least 1; the best is kept as well.
        best: Whether this is the best so far. A step that was the best stays the best when it is saved again.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The state holds a value that a checkpoint cannot store, or the disk is full.
    """
    assert keep >= 1, "the newest checkpoint is always kept"
    data, tensors = codec.encode(dict(state))
    work = unfinished(root, step)
    needed = sum(t.numel() * t.element_size() for t in tensors.values())  # for the message if the disk is full
    try:
        begin(work)
        checkpoint_folder.write(work, data, tensors, step=step, best=best or was_best(root, step))
        return finish(work, step=step, keep=keep)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)  # give the space back: the disk may be full
        raise _unwritten(root, work, needed=needed, error=error) from error


def unfinished(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of a step is written."""
    return root / f"step-{step:06d}{UNFINISHED}"


def begin(work: Path) -> None:
    """Create the folder of an unfinished checkpoint, after a cleanup of what a killed writer has left."""
    work.parent.mkdir(parents=True, exist_ok=True)
    _clean(work.parent)
    work.mkdir()


def finish(work: Path, *, step: int, keep: int) -> Path:
    """Give a complete checkpoint its name, delete the checkpoints that are no longer needed, and return its folder."""
    final_path = work.with_name(work.name.removesuffix(UNFINISHED))
    _install(work, final_path)
    _prune(work.parent, step=step, keep=keep)
    return final_path


def load(root: Path, *, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Read the newest good checkpoint, and skip damaged ones with a warning.

    Args:
        root: Folder of the run's checkpoints.
        step: Read only the checkpoint of this step.

    Returns:
        The step and the state of the checkpoint, with its tensors on the CPU.

    Raises:
        CheckpointError: There is no checkpoint, or no good one.
    """
    return load_with(_read, root, step=step)


def num_ranks(root: Path, step: int) -> int:
    """Return the number of ranks that wrote the checkpoint of a step."""
    return checkpoint_folder.manifest(_folders(root)[step]).ranks


def parts(root: Path, step: int) -> list[dict[str, Any]]:
    """Return the states of all ranks in a checkpoint that `load` has read, with sharded tensors still to be read."""
    folder = _folders(root)[step]
    return [checkpoint_folder.read_part(checkpoint_folder.part_of(folder, i)) for i in range(num_ranks(root, step))]


def load_with(read: Callable[[Path], T], root: Path, *, step: int | None = None) -> tuple[int, T]:
    """Read the newest good checkpoint with a function of its folder that raises `DamagedError`; see `load`."""
    found = _folders(root)
    if step is not None:
        found = {s: path for s, path in found.items() if s == step}
    if not found:
        which = "" if step is None else f" of step {step}"
        there = ", ".join(str(s) for s in _folders(root)) or "none at all"
        raise CheckpointError(f"{root}: there is no checkpoint{which}; steps there: {there}")
    problems = []
    for number, path in sorted(found.items(), reverse=True):
        try:
            state = read(path)
        except DamagedError as error:
            problems.append(f"{path} is damaged: {error}")
            continue
        if problems:
            warnings.warn("; ".join(problems) + f". Going back to {path}.", RuntimeWarning, stacklevel=2)
        return number, state
    raise CheckpointError("; ".join(problems) + f". There is no good checkpoint{' left' if step is None else ''}.")


def joined_data(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position in a stream with the shards of all ranks that wrote a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        data: Position of rank 0.
    """
    shards = dict(data["shards"])
    for rank in range(1, checkpoint_folder.manifest(folder).ranks):
        shards |= checkpoint_folder.read_part(checkpoint_folder.part_of(folder, rank))["data"]["shards"]
    return {**data, "shards": shards}


def _read(folder: Path) -> dict[str, Any]:
    state = checkpoint_folder.read(folder)
    return state | {"data": joined_data(folder, state["data"])} if "data" in state else state


def steps(root: Path) -> list[int]:
    """Return the steps of all checkpoints, good or damaged, in ascending order."""
    return list(_folders(root))


def newest(root: Path) -> int | None:
    """Return the step of the newest checkpoint, good or damaged, or None if there is none."""
    return max(_folders(root), default=None)


def _install(work: Path, final_path: Path) -> None:
    """Rename a finished checkpoint to its final path, and keep the previous one until that has succeeded."""
    # rename cannot replace a folder that is not empty; _clean undoes the first rename after a kill between the two
    aside = final_path.with_name(final_path.name + REPLACED)
    if final_path.exists():
        final_path.rename(aside)
    work.rename(final_path)
    checkpoint_folder.sync(final_path.parent)  # the new name must be on disk before the old checkpoint goes
    if aside.exists():
        _remove(aside)


def _clean(root: Path) -> None:
    """Clean up after a killed writer: delete unfinished folders, and restore a checkpoint that was moved aside."""
    for unfinished in root.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(unfinished)
    for aside in root.glob(f"step-*{REPLACED}"):
        named = aside.with_name(aside.name.removesuffix(REPLACED))
        if named.exists():
            _remove(aside)
        else:
            aside.rename(named)


def _prune(root: Path, *, step: int, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` and the best, counted up to a step."""
    found = _folders(root)
    earlier = [s for s in found if s <= step]
    best = [s for s in earlier if _is_best(found[s])]
    for number, path in found.items():
        if number not in earlier[-keep:] and number not in best[-1:]:
            with contextlib.suppress(OSError):  # an extra checkpoint does no harm; the next save tries again
                _remove(path)


def _remove(path: Path) -> None:
    """Rename a checkpoint, then delete it: a kill in between leaves no half-deleted checkpoint under its name."""
    doomed = path.with_name(path.name.removesuffix(REPLACED) + UNFINISHED)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _folders(root: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by step, in ascending order."""
    found = {}
    for path in root.glob("step-*"):
        if match := re.fullmatch(rf"step-(\d+)({re.escape(REPLACED)})?", path.name):
            number = int(match[1])
            # after a kill inside _install, the checkpoint that was moved aside is the only one of its step
            if not match[2] or number not in found:
                found[number] = path
    return dict(sorted(found.items()))


def was_best(root: Path, step: int) -> bool:
    """Return whether a step has a checkpoint that was the best so far."""
    return _is_best(root / f"step-{step:06d}")


def _is_best(path: Path) -> bool:
    try:
        return checkpoint_folder.manifest(path).best
    except (DamagedError, CheckpointError):
        return False  # also if there is no such checkpoint


def _unwritten(root: Path, work: Path, *, needed: int, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that could not be written, with the last intact checkpoint."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    last = list(_folders(root).values())[-1:]
    intact = f"The last good checkpoint is intact: {last[0]}" if last else "There is no earlier checkpoint"
    if error.errno not in OUT_OF_SPACE:
        return CheckpointError(f"{work}: cannot be written: {reason}. {intact}.")
    return CheckpointError(
        f"{work}: {reason}: a checkpoint takes {needed:,} bytes. {intact}. "
        "Free space on that disk (or lower train.checkpoint.keep), then resume the run."
    )
