"""Copy a nested state into host memory that is used again, so that a training can be put back to a recent step."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@final
class Snapshot:
    """A copy of a state: its tensors in host memory that is kept, everything else as plain data.

    Taking it again copies into the memory of the time before, which is what makes it cheap: no page is touched for
    the first time. Memory of tensors on a CUDA device is page-locked, so that the device copies in the background and
    in order with the training's own work.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._tree: Any = None
        self._is_whole = False

    def take(self, state: Any) -> None:
        """Copy a tree of dicts, lists, tuples, tensors and plain values. Aliases of one tensor stay one."""
        self._is_whole = False  # until the end: an interrupted copy is none
        sources: list[Tensor] = []
        places: dict[Key, int] = {}
        tree = _without_tensors(state, sources, places)
        self._held = [_fitting(source, self._held[i : i + 1]) for i, source in enumerate(sources)]
        if sources:
            torch._foreach_copy_(self._held, sources, non_blocking=True)
        self._tree = tree
        self._is_whole = True

    def read(self) -> Any:
        """Return the state as it was taken. Its tensors are the held ones: they change when it is taken again.

        Returns:
            The tree, or None where nothing whole is held.
        """
        if not self._is_whole:
            return None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return _with_tensors(self._tree, self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return sum(tensor.nbytes for tensor in self._held)


def num_bytes(state: Any) -> int:
    """Return how many bytes the tensors of a tree take."""
    sources: list[Tensor] = []
    _without_tensors(state, sources, {})
    return sum(tensor.nbytes for tensor in sources)


@final
class _Place:
    """Stands in a tree where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(value: Any, sources: list[Tensor], places: dict[Key, int]) -> Any:
    """Return a copy of a tree with places for its tensors, which are added to `sources`, each view once."""
    if isinstance(value, Tensor):
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        index = places.setdefault(key, len(sources)) if value.numel() else len(sources)
        if index == len(sources):
            sources.append(value.detach())
        return _Place(index)
    kind = type(value)
    if kind is collections.OrderedDict:
        copied: Any = collections.OrderedDict((k, _without_tensors(v, sources, places)) for k, v in value.items())
        if hasattr(value, "_metadata"):
            copied._metadata = value._metadata  # of nn.Module.state_dict: versions, which nobody changes
        return copied
    if kind is dict:
        return {k: _without_tensors(v, sources, places) for k, v in value.items()}
    if isinstance(value, Mapping):  # a Counter or defaultdict of plain values
        return copy.copy(value)
    if kind is list:
        return [_without_tensors(v, sources, places) for v in value]
    if kind is tuple and not _is_flat(value):
        return tuple(_without_tensors(v, sources, places) for v in value)
    return value


def _is_flat(value: Sequence[Any]) -> bool:
    """Say whether a tuple is long and of integers: the 625 words of a random generator."""
    return len(value) > 64 and type(value[0]) is int


def _with_tensors(value: Any, held: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return held[value.index]
    kind = type(value)
    if kind is collections.OrderedDict:
        filled: Any = collections.OrderedDict((k, _with_tensors(v, held)) for k, v in value.items())
        if hasattr(value, "_metadata"):
            filled._metadata = value._metadata
        return filled
    if kind is dict:
        return {k: _with_tensors(v, held) for k, v in value.items()}
    if kind is list:
        return [_with_tensors(v, held) for v in value]
    if kind is tuple and not _is_flat(value):
        return tuple(_with_tensors(v, held) for v in value)
    return value


def _fitting(source: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return memory for a copy: that of the time before where it fits."""
    if held and held[0].shape == source.shape and held[0].dtype == source.dtype and held[0].stride() == source.stride():
        return held[0]
    return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
