"""Copy a nested state into reused host memory, so that a training can return to a recent step."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@final
class Snapshot:
    """A copy of a state: its tensors in host memory, everything else as plain data.

    Each copy reuses the memory of the previous copy, so that no page is touched for the first time. Memory of tensors
    on a CUDA device is page-locked, so that the device copies in the background, in order with the training.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._tree: Any = None

    def take(self, state: Any) -> None:
        """Copy a tree of dicts, lists, tuples, tensors and plain values. Aliases of one tensor stay one."""
        self._tree = None  # until the end: an interrupted copy is none
        tree, sources = _without_tensors(state)
        self._held = [_fitting(source, self._held[i : i + 1]) for i, source in enumerate(sources)]
        if sources:
            torch._foreach_copy_(self._held, sources, non_blocking=True)
        self._tree = tree

    def read(self) -> Any:
        """Return the state of the last complete `take`, or None. Its tensors change with the next `take`."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return _map_leaves(self._tree, lambda leaf: self._held[leaf.index] if isinstance(leaf, _Place) else leaf)


def num_bytes(state: Any) -> int:
    """Return the number of bytes of the tensors of a tree."""
    return sum(tensor.nbytes for tensor in _without_tensors(state)[1])


@final
class _Place:
    """A placeholder for a tensor in a tree."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(state: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy of a tree with placeholders for its tensors, and the tensors, each view once."""
    sources: list[Tensor] = []
    places: dict[Key, int] = {}

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        index = places.setdefault(key, len(sources)) if leaf.numel() else len(sources)
        if index == len(sources):
            sources.append(leaf.detach())
        return _Place(index)

    return _map_leaves(state, replace), sources


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a tree with a function applied to everything that is not a container.

    torch's `tree_map` would lose the versions of modules, which `nn.Module.state_dict` keeps in an attribute.
    """
    kind = type(value)
    if kind is collections.OrderedDict:
        copied: Any = collections.OrderedDict((k, _map_leaves(v, function)) for k, v in value.items())
        if hasattr(value, "_metadata"):
            copied._metadata = value._metadata
        return copied
    if kind is dict:
        return {k: _map_leaves(v, function) for k, v in value.items()}
    if isinstance(value, Mapping):  # a Counter or defaultdict of plain values
        return copy.copy(value)
    if kind is list:
        return [_map_leaves(v, function) for v in value]
    if kind is tuple and not (len(value) > 64 and type(value[0]) is int):  # not the 625 words of a random generator
        return tuple(_map_leaves(v, function) for v in value)
    return function(value)


def _fitting(source: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return memory for a copy: the memory of the previous copy if it fits."""
    if held and held[0].shape == source.shape and held[0].dtype == source.dtype and held[0].stride() == source.stride():
        return held[0]
    return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
