"""Find the tensors in a nest of tuples, lists, dicts and output objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in the output of a forward pass.

    Args:
        value: Any object.
        depth: Levels of nesting to read: objects may contain themselves.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part, depth - 1)
    elif depth and isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part, depth - 1)
    elif depth and hasattr(value, "__dataclass_fields__"):
        # a declared field may be missing from the object
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name, None), depth - 1)
