"""Write and read tensors that are sharded over ranks, with torch.distributed.checkpoint and without pickle.

The default storage of torch.distributed.checkpoint pickles an index. Its safetensors storage needs none: each rank
writes one file with its shards and their offsets, and any number of ranks can read them.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.errors import CheckpointError
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.state.codec import Sharded
from gradwatch.state.snapshot import map_leaves

FOLDER = "sharded"
SHARD = "shard-{:05d}-*.safetensors"
"""Name of the file of a rank, counted from 1."""


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state with a placeholder for each distributed tensor, and these tensors by name."""
    tensors: dict[str, Tensor] = {}

    def replace(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not (isinstance(leaf, Tensor) and is_distributed(leaf)):
            return leaf
        name = "/".join(map(str, path))
        tensors[name] = leaf.detach()
        return Sharded(name, tuple(leaf.shape), leaf.dtype)

    return map_leaves(state, replace), tensors


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of this rank; all ranks must call it together.

    Raises:
        CheckpointError: This version of torch has no such storage, or a rank could not write.
    """
    dcp = _import_dcp()
    writer = _storage_writer()(str(folder), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:
        reasons = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise CheckpointError(f"{folder} cannot be written: {'; '.join(reasons)}") from error


def find_files(folder: Path, rank: int) -> list[Path]:
    """Return the files with the shards of a rank."""
    return sorted(folder.glob(SHARD.format(rank + 1)))


def read_whole(state: Any, folder: Path) -> Any:
    """Return a state with its sharded tensors read from a folder, whole and on the CPU.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    targets: dict[str, Tensor] = {}

    def allocate(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        return targets.setdefault(leaf.name, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))

    made = map_leaves(state, allocate)
    _read(folder, targets)
    return made


def read_distributed(state: Mapping[str, Any], folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of a training with its tensors sharded like the parameters of a model.

    Every rank reads its own part, without the others.

    Args:
        state: State with `model` and `optimizer`; each tensor is whole or `Sharded`.
        folder: Folder of the shards.
        model: The model.
        optimizer: Its optimizer.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    own: dict[str, Any] = model.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    targets: dict[str, Tensor] = {}

    def allocate(leaf: Any, path: tuple[Any, ...]) -> Any:
        like = None
        if path[:1] == ("model",):
            like = own.get(path[-1])
        elif path[:2] == ("optimizer", "state") and path[2] < len(params):
            like = params[path[2]]
        fits = isinstance(like, Tensor) and isinstance(leaf, (Tensor, Sharded)) and tuple(leaf.shape) == like.shape
        if isinstance(leaf, Sharded):
            # not `empty_like` of a parameter, which would require gradients
            made = like.detach() if fits else torch.empty(leaf.shape)  # type: ignore[union-attr]  # it fits
            return targets.setdefault(leaf.name, torch.empty_like(made, dtype=leaf.dtype))
        return _distributed(leaf, like) if fits and is_distributed(like) and leaf.ndim else leaf  # type: ignore[arg-type]  # it fits

    made = map_leaves(state, allocate)
    _read(folder, targets)
    return made


def _read(folder: Path, targets: dict[str, Tensor]) -> None:
    if not targets:
        return
    dcp = _import_dcp()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it reads without the other ranks
            dcp.load(targets, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (Exception, dcp.CheckpointException) as error:  # torch raises errors of many types
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def _import_dcp() -> Any:
    # imported here: only sharded states need it, and the import is slow
    return importlib.import_module("torch.distributed.checkpoint")


def _storage_writer() -> Any:
    """Return the class of torch that writes shards as safetensors."""
    writer = getattr(_import_dcp(), "HuggingFaceStorageWriter", None)
    if writer is None or "save_distributed" not in inspect.signature(writer).parameters:
        raise CheckpointError(
            f"train.parallel: torch {torch.__version__} cannot write the shards of a model as safetensors; update "
            "torch, or set train.parallel: ddp"
        )
    return writer


def _distributed(tensor: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    # without a source rank: every rank has read the same tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
