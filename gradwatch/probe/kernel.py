"""Which code reads tensors: the native extension on a CPU, Triton on a GPU, torch operations elsewhere."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Literal

import torch

Kernel = Literal["auto", "native", "torch"]


REVISION = 9
"""Revision of the extension that this package calls, as in `_native.c`."""


def _load() -> ModuleType | None:
    """Import the extension and show it what a tensor is.

    None where it was not built or this torch lends no tensors, and, with a warning, where it is of another revision.
    """
    try:
        from gradwatch.probe import _native

        revision = getattr(_native, "REVISION", 1)
        if revision != REVISION:
            text = (
                f"gradwatch.probe._native: got revision {revision}, expected {REVISION}: torch operations work for it"
            )
            warnings.warn(f"{text}; build it anew with pip install -e .", RuntimeWarning, stacklevel=2)
            return None
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


def triton() -> ModuleType | None:
    """Return the kernels for a GPU, or None where Triton is not installed or has failed."""
    if "triton" in _FAILED:
        return None
    try:
        from gradwatch.probe import _triton
    except ImportError:
        _FAILED.add("triton")
        return None
    return _triton


def give_up_triton(error: Exception) -> None:
    """Have torch operations do from now on what a kernel in Triton failed to do, and say so."""
    _FAILED.add("triton")
    text = f"its kernels in Triton failed, torch operations do their work: {type(error).__name__}: {error}"
    warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=2)


_FAILED: set[str] = set()
"""What has been tried and is not to be tried again."""
