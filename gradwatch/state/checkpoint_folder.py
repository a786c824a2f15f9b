"""Write the folder of one checkpoint with checksums, and verify the checksums before reading it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from gradwatch.errors import CheckpointError
from gradwatch.state import codec, safetensors_file, sharded

FORMAT = 2
"""Format version, raised with every change that an older gradwatch could not read."""
OF_ONE_RANK = 1
"""Format version of a checkpoint of one rank, which has not changed."""
RANKS = "ranks"
"""Folder with a folder for each rank but the first."""
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


class DamagedError(ValueError):
    """Report a checkpoint that differs from the written one. The text gives the reason."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Hold the contents of a checkpoint's manifest.

    Args:
        step: Number of optimizer steps completed when the checkpoint was written.
        best: Whether the checkpoint was the best of the run so far.
        ranks: Number of ranks that wrote the checkpoint.
        files: Size in bytes and SHA-256 of each file, by file name.
    """

    step: int
    best: bool
    ranks: int
    files: dict[str, dict[str, Any]]


def write(
    folder: Path,
    data: Any,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    best: bool,
    ranks: int = 1,
    shards: Iterable[Path] = (),
) -> None:
    """Write a checkpoint, or the part of a rank, into a folder, and return when all files are on the disk.

    Args:
        folder: Empty folder.
        data: JSON data from `codec.encode`.
        tensors: Tensors from `codec.encode`, by name.
        step: Number of optimizer steps completed.
        best: Whether the checkpoint is the best of the run so far.
        ranks: Number of ranks that write the checkpoint.
        shards: Files that this rank has already written.
    """
    entries = {os.path.relpath(path, folder): _entry(path) for path in shards}
    entries[TENSORS] = _written(folder / TENSORS, safetensors_file.chunks(tensors))
    entries[STATE] = _written(folder / STATE, [json.dumps(data, allow_nan=False).encode()])
    # the manifest comes last: it lists the checksums of the other files
    of_ranks = {"format": FORMAT, "ranks": ranks} if ranks > 1 else {"format": OF_ONE_RANK}
    contents = of_ranks | {"step": step, "best": best, "files": entries}
    _written(folder / MANIFEST, [json.dumps(contents, indent=1).encode()])
    sync(folder)


def manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: The manifest cannot be read.
        CheckpointError: A newer gradwatch wrote the checkpoint.
    """
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        if data["format"] > FORMAT:
            raise CheckpointError(
                f"{folder}: format {data['format']} is newer than this gradwatch reads ({FORMAT}): update gradwatch"
            )
        ranks = int(data.get("ranks", 1))
        return Manifest(step=int(data["step"]), best=bool(data["best"]), ranks=ranks, files=dict(data["files"]))
    except CheckpointError:  # a ValueError too: without this clause, a newer format would be reported as damage
        raise
    except FileNotFoundError as error:  # before OSError, its base class
        raise DamagedError(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error})") from error


def read(folder: Path) -> dict[str, Any]:
    """Verify the checksums of a checkpoint, and return its state with whole tensors; with several ranks, rank 0's.

    Raises:
        DamagedError: The checkpoint differs from the written one.
        CheckpointError: A newer gradwatch wrote the checkpoint.
    """
    verify(folder)
    with _damage():
        state: dict[str, Any] = sharded.read_whole(read_part(folder), folder / sharded.FOLDER)
        return state


def verify(folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
    """Verify the checksums of a checkpoint; several ranks can share the work.

    Raises:
        DamagedError: The checkpoint differs from the written one.
        CheckpointError: A newer gradwatch wrote the checkpoint.
    """
    for number in range(rank, manifest(folder).ranks, ranks):
        part = part_of(folder, number)
        expected = manifest(part).files
        with _damage():
            for name in dict.fromkeys((STATE, TENSORS, *expected)):
                _verify(part / name, expected[name])


def part_of(folder: Path, rank: int) -> Path:
    """Return the folder with the part of a rank in a checkpoint."""
    return folder / RANKS / str(rank) if rank else folder


def read_part(folder: Path) -> dict[str, Any]:
    """Return the state in a verified checkpoint or part of one; `codec.Sharded` stands for each sharded tensor.

    Raises:
        DamagedError: The state cannot be read.
    """
    with _damage():
        state = codec.decode(json.loads((folder / STATE).read_bytes()), safetensors_file.read(folder / TENSORS))
        if not isinstance(state, dict):
            raise DamagedError(f"{STATE} holds no mapping")
        return state


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Report an error while a checkpoint is read as damage."""
    try:
        yield
    except DamagedError:  # a ValueError too: its text is already complete
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DamagedError(f"it cannot be read ({type(error).__name__}: {error})") from error


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file's size and checksum with the manifest."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # the size first: a truncated file is reported as such, and without reading it
        if size != expected["bytes"]:
            raise DamagedError(f"{path.name} has {size:,} bytes, expected {expected['bytes']:,}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise DamagedError(f"{path.name} does not match its checksum")


def sync(path: Path) -> None:
    """Wait until the directory entries of a folder are on the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file, wait until it is on the disk, and return its size and checksum, computed in the same pass."""
    size, digest = 0, hashlib.sha256()
    with path.open("xb") as file:  # exclusive: the folder is expected to be empty
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
