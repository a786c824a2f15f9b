"""Which code reads tensors: the native extension on a CPU, Triton on a GPU, torch operations elsewhere."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Literal

import torch

Kernel = Literal["auto", "native", "torch"]


REVISION = 12
"""Revision of the extension that this package calls, as in `csrc/module.c`."""


def _load() -> tuple[ModuleType | None, str]:
    """Import the extension and show it what a tensor is. Returns it, or None and why it cannot be used."""
    try:
        import gradwatch._native as native
    except ModuleNotFoundError:
        return None, "is not built"
    except ImportError as error:
        return None, f"cannot be loaded: {error}"
    revision = getattr(native, "REVISION", 1)
    if revision != REVISION:
        return None, f"is an old build: got revision {revision}, expected {REVISION}"
    try:
        native.bind(torch.Tensor, torch.nn.Parameter)
    except (AttributeError, ValueError, RuntimeError) as error:
        return None, f"cannot read the tensors of torch {torch.__version__}: {error}"
    return native, ""


_NATIVE, _REASON = _load()


def choose(kernel: Kernel = "auto") -> ModuleType | None:
    """Return the extension, or None where torch operations are to do the work.

    Args:
        kernel: `auto` takes the extension if it is there, and says once if it is not; `native` insists on it; `torch`
            never takes it.
    """
    if kernel == "native" and _NATIVE is None:
        raise ImportError(
            f"gradwatch._native: {_REASON}, expected a compiled extension; "
            "install gradwatch where a C compiler is, or use kernel='torch'"
        )
    if kernel == "auto" and _NATIVE is None and "native" not in _FAILED:
        _FAILED.add("native")
        warnings.warn(
            f"the C extension of gradwatch {_REASON}; torch operations do its work, which makes watching several "
            "times as slow. Where a C compiler is, pip install -e . builds it.",
            RuntimeWarning,
            stacklevel=2,
        )
    return None if kernel == "torch" else _NATIVE


def triton() -> ModuleType | None:
    """Return the kernels for a GPU, or None where Triton is not installed or has failed."""
    if "triton" in _FAILED:
        return None
    try:
        from gradwatch.probe.device import triton_reduce
    except ImportError:
        _FAILED.add("triton")
        return None
    return triton_reduce


def give_up_triton(error: Exception) -> None:
    """Have torch operations do from now on what a kernel in Triton failed to do, and say so."""
    _FAILED.add("triton")
    text = f"its kernels in Triton failed, torch operations do their work: {type(error).__name__}: {error}"
    warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=2)


_FAILED: set[str] = set()
"""What has been tried and is not to be tried again, or told of again."""
