"""Find out whether a saved tensor may have hooks, also before torch 2.11, where the tensor does not show them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_SAYS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether a saved tensor has its hook as an attribute."""


class _Uses:
    """Count the uses of hooks in this process: the begun ones, and the open ones."""

    begun = 0
    open = 0


def count_uses() -> int | None:
    """Return the number of begun uses of hooks, for `may_have_hook`; None if a use is open."""
    return None if _Uses.open else _Uses.begun


def may_have_hook(saved: Any, since: int | None) -> bool:
    """Return whether reading a saved tensor may run a hook, which may recompute a region.

    Args:
        saved: A saved tensor, as `node._raw_saved_self`.
        since: Result of `count_uses` before the tensor was saved. Before torch 2.11, any use since then counts.
    """
    return saved.unpack_hook is not None if _SAYS_HOOKS else since != _Uses.begun


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


if not _SAYS_HOOKS:
    _count_contexts()
