"""Which code reads tensors on the CPU: the native extension where it was built, torch operations elsewhere."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

Kernel = Literal["auto", "native", "torch"]


def _load() -> ModuleType | None:
    """Import the extension and show it what a tensor is. None where it was not built or this torch lends no tensors."""
    try:
        from gradwatch.probe import _native

        _native.bind(torch.Tensor, torch.nn.Parameter)
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None
    return _native


_NATIVE = _load()


def choose(kernel: Kernel = "auto") -> ModuleType | None:
    """Return the extension, or None where torch operations are to do the work.

    Args:
        kernel: `auto` takes the extension if it is there; `native` insists on it; `torch` never takes it.
    """
    if kernel == "native" and _NATIVE is None:
        raise ImportError(
            "gradwatch.probe._native: not built, expected a compiled extension; "
            "install gradwatch where a C compiler is, or use kernel='torch'"
        )
    return None if kernel == "torch" else _NATIVE
