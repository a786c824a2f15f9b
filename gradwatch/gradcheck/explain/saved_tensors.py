"""Copy the tensors that operations save for backward, and report those changed in place before their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.gradcheck.stepping.cuts import GraphCuts


@final
class SavedCopies:
    """Copies of saved tensors.

    Args:
        cuts: Counts the saved tensors, to order them with the writes.

    Attributes:
        changed: Memory of each tensor that had changed when its backward read it, with its position.
    """

    def __init__(self, cuts: GraphCuts) -> None:
        self.changed: list[tuple[int, int]] = []
        self._cuts = cuts
        self._kept: list[tuple[Tensor, Tensor]] = []

    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor and a copy."""
        # a leaf stays itself: a detached one would take no second derivative
        self._cuts.saved += 1
        alias = tensor.detach()
        self._kept.append((alias, alias.clone()))
        return len(self._kept) - 1, tensor if tensor.is_leaf else None

    def unpack(self, packed: Any) -> Tensor:
        """Return the copy, and note whether the tensor itself has changed."""
        position: int = packed[0]
        leaf: Tensor | None = packed[1]
        alias, copy = self._kept[position]
        if alias.shape == copy.shape and torch.equal(alias, copy):
            return alias if leaf is None else leaf
        self.changed.append((alias.untyped_storage().data_ptr(), position))
        return copy


@contextmanager
def unchanged(cuts: GraphCuts) -> Iterator[SavedCopies]:
    """Let every backward read the values that its forward saved, whatever was written since."""
    copies = SavedCopies(cuts)
    with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
        yield copies
