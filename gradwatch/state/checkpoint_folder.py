"""The folder of one checkpoint: written to the disk with checksums, verified before it is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from torch import Tensor

from gradwatch.errors import CheckpointError
from gradwatch.state import codec, safetensors_file

FORMAT = 1
"""Grows with every change after which an older gradwatch could not read a checkpoint."""
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


class DamagedError(ValueError):
    """A checkpoint that is not what was written. The text says why."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint's manifest says.

    Args:
        step: Optimizer steps made when it was written.
        best: Whether it was the best of the run so far.
        files: Bytes and SHA-256 of each file by name.
    """

    step: int
    best: bool
    files: dict[str, dict[str, Any]]


def write(folder: Path, data: Any, tensors: Mapping[str, Tensor], *, step: int, best: bool) -> None:
    """Fill an empty folder, and return when all of it is on the disk. `data` and `tensors` as `encode` gives them."""
    entries = {}
    with _HashedFile(folder / TENSORS) as file:
        safetensors_file.write(file, tensors)
    entries[TENSORS] = file.entry
    with _HashedFile(folder / STATE) as file:
        file.write(json.dumps(data, allow_nan=False).encode())
    entries[STATE] = file.entry
    with _HashedFile(folder / MANIFEST) as file:
        file.write(json.dumps({"format": FORMAT, "step": step, "best": best, "files": entries}, indent=1).encode())
    sync(folder)


def manifest(folder: Path) -> Manifest:
    """Return what the manifest says.

    Raises:
        DamagedError: It cannot be read.
        CheckpointError: A newer gradwatch wrote it.
    """
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        if data["format"] > FORMAT:
            raise CheckpointError(
                f"{folder}: format {data['format']} is newer than this gradwatch reads ({FORMAT}): update gradwatch"
            )
        return Manifest(step=int(data["step"]), best=bool(data["best"]), files=dict(data["files"]))
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error})") from error


def read(folder: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, after its checksums have been verified.

    Raises:
        DamagedError: It is not what was written.
        CheckpointError: A newer gradwatch wrote it.
    """
    expected = manifest(folder).files
    try:
        for name in (STATE, TENSORS):
            _verify(folder / name, expected[name])
        state = codec.decode(json.loads((folder / STATE).read_bytes()), safetensors_file.read(folder / TENSORS))
    except DamagedError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DamagedError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{STATE} holds no mapping")
    return state


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file's size and checksum with those in the manifest."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise DamagedError(f"{path.name} has {size:,} bytes, expected {expected['bytes']:,}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise DamagedError(f"{path.name} does not match its checksum")


def sync(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
class _HashedFile:
    """A file that is on the disk, and whose checksum is known, when it is closed."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._file = path.open("xb")
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
