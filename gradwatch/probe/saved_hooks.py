"""Read saved tensors without running their hooks, which torch exposes since 2.11."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.graph.graph import Node

_EXPOSES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether a saved tensor has its hook as an attribute."""


class _Uses:
    """Count the contexts of saved-tensor hooks in this process: all that were entered, and those still open."""

    begun = 0
    open = 0


def count_uses() -> int | None:
    """Return the number of hook contexts entered so far, for `may_have_hook`; None if one is open."""
    return None if _Uses.open else _Uses.begun


def may_have_hook(saved: Any, since: int | None) -> bool:
    """Return whether reading a saved tensor may run a hook, which may recompute a region.

    Args:
        saved: A saved tensor, as `node._raw_saved_self`.
        since: Result of `count_uses` before the tensor was saved. Before torch 2.11, any use since then counts.
    """
    return saved.unpack_hook is not None if _EXPOSES_HOOKS else since != _Uses.begun


def saved_tensor(node: Node, name: str, since: int | None) -> Tensor | None:
    """Return a tensor that a node saves, or None if the tensor is not in memory unchanged.

    Args:
        node: A node of the graph.
        name: Name of the tensor, such as `self`.
        since: Result of `count_uses` before the tensor was saved.
    """
    # the raw attribute shows hooks without running them
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or may_have_hook(raw, since):
        return None
    try:
        kept = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed by a backward, or overwritten since
        return None
    return None if kept is None else local_part(kept)


def _count_contexts() -> None:
    """Make `saved_tensors_hooks` count its uses: checkpointing and offloading build on this class."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    def counted_enter(self: saved_tensors_hooks) -> None:
        _Uses.begun += 1
        _Uses.open += 1
        enter(self)

    def counted_leave(self: saved_tensors_hooks, *args: object) -> None:
        _Uses.open -= 1
        leave(self, *args)

    saved_tensors_hooks.__enter__ = counted_enter  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = counted_leave  # type: ignore[method-assign]


if not _EXPOSES_HOOKS:
    _count_contexts()
