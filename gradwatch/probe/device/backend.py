"""Select the code that reads tensors: the C extension on a CPU, Triton on a GPU, torch operations elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Literal, TypeVar

import torch

Kernel = Literal["auto", "native", "torch"]
T = TypeVar("T")


REVISION = 14
"""Revision of the extension that this package calls, as in `csrc/module.c`."""


def _load() -> tuple[ModuleType | None, str]:
    """Return the extension, bound to the tensor types of torch, or None and the reason."""
    try:
        import gradwatch._native as native
    except ModuleNotFoundError:
        return None, "is not built"
    except ImportError as error:
        return None, f"cannot be loaded: {error}"
    # an old build may lie in the source folder: it has other functions, or other arguments
    revision = getattr(native, "REVISION", 1)
    if revision != REVISION:
        return None, f"is an old build: got revision {revision}, expected {REVISION}"
    try:
        native.bind(torch.Tensor, torch.nn.Parameter)
    # a torch version without access: attributes are missing, or the exchange table has another version
    except (AttributeError, ValueError, RuntimeError) as error:
        return None, f"cannot read the tensors of torch {torch.__version__}: {error}"
    return native, ""


_NATIVE, _REASON = _load()


def select_backend(kernel: Kernel = "auto") -> ModuleType | None:
    """Return the extension, or None for torch operations.

    Args:
        kernel: `auto` uses the extension if it is available, and warns once if not; `native` requires it; `torch` never
            uses it.

    Raises:
        ImportError: `native` is required and not available.
    """
    if kernel == "native" and _NATIVE is None:
        raise ImportError(
            f"gradwatch._native: {_REASON}, expected a compiled extension; "
            "install gradwatch with a C compiler available, or use kernel='torch'"
        )
    # here and not at import: a user of torch operations needs no warning
    if kernel == "auto" and _NATIVE is None and "native" not in _FAILED:
        _FAILED.add("native")
        warnings.warn(
            f"the C extension of gradwatch {_REASON}; torch operations replace it, which makes monitoring several "
            "times slower. With a C compiler, pip install -e . builds it.",
            RuntimeWarning,
            stacklevel=2,
        )
    return None if kernel == "torch" else _NATIVE


def attempt_triton(action: Callable[[ModuleType], T]) -> T | None:
    """Return the result of an action on the kernels for a GPU; None if Triton is not installed, or has failed.

    After a failure, torch operations do the work for the rest of the process, and a warning says so.
    """
    if "triton" in _FAILED:
        return None
    try:
        # only here, since Triton may not be installed
        from gradwatch.probe.device import triton_reduce
    except ImportError:
        _FAILED.add("triton")
        return None
    try:
        return action(triton_reduce)
    except Exception as error:  # a compiler for GPUs raises errors of any type
        _FAILED.add("triton")
        text = f"Triton kernels failed; falling back to torch operations: {type(error).__name__}: {error}"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=2)
        return None


_FAILED: set[str] = set()
"""Backends that have failed: they are neither tried nor reported again."""
