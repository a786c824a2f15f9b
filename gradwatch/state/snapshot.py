"""Copy a nested state into reused host memory, to restore a training to a recent step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""Keys and indices that lead to a part of a nested state."""
Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@final
class Snapshot:
    """Hold a copy of a state: its tensors in host memory, everything else as plain data.

    Each copy reuses the memory of the previous copy, so that no page is touched for the first time. Copies of CUDA
    tensors use page-locked memory. The device copies in the background, in order with the training.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._tree: Any = None

    def take(self, state: Any) -> None:
        """Copy a nested state of dicts, lists, tuples, tensors and plain values. Copy aliases of a tensor once."""
        self._tree = None  # set at the end, so that an interrupted copy is not used
        tree, sources = _without_tensors(state)
        # a slice: it is empty if the previous copy had fewer tensors
        self._held = [_fitting(source, self._held[i : i + 1]) for i, source in enumerate(sources)]
        if sources:  # torch rejects empty lists
            torch._foreach_copy_(self._held, sources, non_blocking=True)
        self._tree = tree

    def read(self) -> Any:
        """Return the state of the last complete `take`, or None. The next `take` overwrites its tensors."""
        if torch.cuda.is_initialized():  # the copy may still be in flight
            torch.cuda.synchronize()
        return map_leaves(self._tree, lambda leaf, _: self._held[leaf.index] if isinstance(leaf, _Place) else leaf)


def num_bytes(state: Any) -> int:
    """Return the total size in bytes of the tensors in a nested state."""
    return sum(tensor.nbytes for tensor in _without_tensors(state)[1])


@final
class _Place:
    """Stand for a tensor in a nested state."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(state: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy of a state with placeholders for its tensors, and the list of tensors, each view once."""
    sources: list[Tensor] = []
    places: dict[Key, int] = {}

    def replace(leaf: Any, _: Path) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # all empty tensors have the data pointer 0 without being aliases
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        index = places.setdefault(key, len(sources)) if leaf.numel() else len(sources)
        if index == len(sources):
            sources.append(leaf.detach())
        return _Place(index)

    return map_leaves(state, replace), sources


def map_leaves(value: Any, function: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Copy a nested state with a function applied to everything that is not a container, and to its path.

    torch's `tree_map` would lose the module versions, which `nn.Module.state_dict` stores in an attribute.
    """
    if isinstance(value, dict):
        copied = value.copy()
        for key, item in value.items():
            copied[key] = map_leaves(item, function, (*path, key))
        if hasattr(value, "_metadata"):
            copied._metadata = value._metadata  # type: ignore[attr-defined]  # an OrderedDict accepts attributes
        return copied
    # the state of Python's random generator is a tuple of 625 words without tensors
    if type(value) in (list, tuple) and not (len(value) > 64 and type(value[0]) is int):
        return type(value)(map_leaves(item, function, (*path, i)) for i, item in enumerate(value))
    return function(value, path)


def _fitting(source: Tensor, held: Sequence[Tensor]) -> Tensor:
    # strides count too: the copy must have the layout of its source
    if held and held[0].shape == source.shape and held[0].dtype == source.dtype and held[0].stride() == source.stride():
        return held[0]
    return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
