"""Inspect the operations that torch dispatches: find the tensors they write to, and run compiled models eagerly."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def changed_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensor arguments that an operation writes into."""
    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)]
    return [t for t in tree_leaves(written) if isinstance(t, Tensor)]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models in eager mode."""
    # a compiled graph would hide its operations from the tracer
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # hooks see the wrapper too, which is harmless
        yield


@cache  # the schema of an operation does not change
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
